"""Tasks with tools: the policy writes Python, which runs in a sandbox on small files, and then answers.

Each call starts a new process that sees only the episode's files as the last call left them. So no state
hides in an interpreter, a replayed episode is identical, and a run that is killed leaves nothing behind. The
reward is computed outside the sandbox, from the answer and the files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Literal

from pydantic import Field, model_validator

from perilune.environments.builtin.tool_calls import (
    ANSWER_MARK,
    Answer,
    Call,
    InvalidAction,
    read_action,
    render_output,
)
from perilune.environments.builtin.tool_tasks import FAMILIES, ToolTask, matches_expected
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn, ask, end_episode
from perilune.environments.core.protocol import EpisodeFailedError, Split, Task, Transcript
from perilune.environments.core.splits import select_unique
from perilune.errors import PeriluneError
from perilune.frozen import Frozen
from perilune.sandbox import Execution, Sandbox, SandboxLimits

_RESULTS_FILE = "results.json"
_INSTRUCTIONS = """\
You work in a folder with these files: {files}.
To run Python there, write one fenced block of it and nothing after it; you are told what it prints. It begins
anew every time, with the files as they are. There are tools, too: list_files, read_file (path), write_file
(path, text) and python (code), called like this:
<tool_call>{{"name": "read_file", "arguments": {{"path": "..."}}}}</tool_call>
When you are done, answer with <answer>...</answer>.

{question}"""
_CHECK_SCRIPT = """
import json, solution
cases = json.load(open("cases.json"))
results = [getattr(solution, {function!r})(*case) for case in cases]
json.dump(results, open({results!r}, "w"))
"""


class SandboxSpec(Frozen):
    """Limits of one run of the policy's code."""

    seconds: float = Field(
        2.0,
        gt=0,
        le=60,
        description="time limit of each run of the policy's code, in seconds; must be below"
        " `episodes.seconds`",
    )
    memory_mb: int = Field(
        256, ge=16, description="maximum memory of all processes of a run together, in MiB"
    )
    processes: int = Field(4, ge=1, le=64, description="maximum simultaneous processes and threads of a run")
    scratch_mb: int = Field(4, ge=1, le=256, description="maximum size of the scratch folder, in MiB")
    output: int = Field(
        2000,
        ge=64,
        le=1 << 20,
        description="maximum output that the policy sees at a time: bytes of what its code prints (the middle"
        " of a longer output is left out), or characters of other results",
    )
    twice: bool = Field(False, description="run all code twice and count differing results as `unsteady`")
    allow_missing: tuple[str, ...] = Field(
        (),
        description="walls of the sandbox (see `perilune sandbox audit`) that this machine may lack; a"
        " missing wall that is not listed is an error",
    )

    def limits(self) -> SandboxLimits:
        return SandboxLimits(
            seconds=self.seconds,
            cpu_seconds=max(int(self.seconds + 1), 1),
            memory_bytes=self.memory_mb << 20,
            processes=self.processes,
            scratch_bytes=self.scratch_mb << 20,
            output_bytes=self.output,
        )


class ToolsSpec(Frozen):
    """The environment section of a recipe, for `id: tools`."""

    id: Literal["tools"] = Field("tools", description="id of the environment")
    task: Literal["all", "figure", "column", "best", "clean", "transform", "repair"] = Field(
        "all", description="the task family"
    )
    prompt: Literal["natural", "compact"] = Field(
        "natural", description="compact: a few characters, for tiny models; needs `task: figure`"
    )
    turns: int = Field(6, ge=1, le=32, description="maximum turns of an episode")
    sandbox: SandboxSpec = Field(default_factory=SandboxSpec, description="limits of the policy's code")

    @model_validator(mode="after")
    def _has_a_compact_form(self) -> ToolsSpec:
        if self.prompt == "compact" and self.task != "figure":
            raise ValueError("only the family figure has a compact prompt; set task: figure")
        return self


class ToolsEnvironment(MultiTurn):
    """Reward 1 for the right result at the end, however the policy reached it."""

    Spec = ToolsSpec
    confined = False  # it starts a sandbox, which confines the policy's code

    def __init__(self, spec: ToolsSpec) -> None:
        self.spec = spec
        self.id = f"tools/{spec.task}"
        self.max_turns = spec.turns
        self.own_format = "tool calls, and a mark before the answer"
        self._compact = spec.prompt == "compact"
        self._sandbox = Sandbox(spec.sandbox.limits(), allow_missing=spec.sandbox.allow_missing)

    @staticmethod
    def families() -> tuple[str, ...]:
        return ("all", *FAMILIES)

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Yield distinct tasks, each drawn from (seed, index), until the generator has no new ones."""
        drawn = (self._draw_task(random.Random(f"tools/{seed}/{index}")) for index in itertools.count())
        return (task for _, task in select_unique(split, ((task.task_id, task) for task in drawn)))

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        files: Mapping[str, bytes] = {name: text.encode() for name, text in task.data["files"].items()}
        counts: dict[str, float] = {"calls": 0.0}
        action = read_action((yield ask()), compact=self._compact)
        while not isinstance(action, Answer):
            output, files = self._execute_action(action, files, counts)
            action = read_action((yield ask(output, role="tool")), compact=self._compact)
        right = float(self._is_right(task, action.text, files))
        strategy = "tools" if counts["calls"] else "guess"
        yield end_episode(right, terms={"right": right}, metrics={f"strategy/{strategy}": 1.0, **counts})

    def gold(self, task: Task) -> Transcript:
        *earlier, answer = task.data["actions"]
        return Transcript(answer, earlier=tuple(earlier))

    def close(self) -> None:
        self._sandbox.close()

    def _execute_action(
        self, action: Call | InvalidAction, files: Mapping[str, bytes], counts: dict[str, float]
    ) -> tuple[str, Mapping[str, bytes]]:
        """Return the output that the policy sees, and the files after the call."""
        if isinstance(action, InvalidAction):
            return render_output(f"error: {action.reason}", compact=self._compact), files
        counts["calls"] += 1.0
        arguments = action.arguments
        match action.name:
            case "list_files":
                return render_output("\n".join(sorted(files)), compact=self._compact), files
            case "read_file":
                content = files.get(arguments["path"])
                text = "error: no such file" if content is None else content.decode(errors="replace")
                return render_output(text[: self.spec.sandbox.output], compact=self._compact), files
            case "write_file":
                path, text = repr(arguments["path"]), repr(arguments["text"])
                return self._run(_WRITE_SCRIPT.format(path=path, text=text), files, counts)
            case _:
                return self._run(arguments["code"], files, counts)

    def _run(
        self, code: str, files: Mapping[str, bytes], counts: dict[str, float]
    ) -> tuple[str, Mapping[str, bytes]]:
        run = self._execute(code, files)
        if self.spec.sandbox.twice:
            again = self._execute(code, files)
            if (again.output, again.files) != (run.output, run.files):
                counts["unsteady"] = counts.get("unsteady", 0.0) + 1.0
        ended = ""
        if run.cause not in ("", "error"):
            counts[f"contained/{run.cause}"] = counts.get(f"contained/{run.cause}", 0.0) + 1.0
            ended = f"[ended: {run.cause}]\n"
        return render_output(run.output + ended, compact=self._compact), run.files

    def _execute(self, code: str, files: Mapping[str, bytes]) -> Execution:
        try:
            return self._sandbox.run(code, files)
        except PeriluneError as error:
            raise EpisodeFailedError("sandbox", error.what) from None

    def _is_right(self, task: Task, answer: str, files: Mapping[str, bytes]) -> bool:
        data = task.data
        if answer != data["answer"]:
            return False
        for name, expected in data["outputs"].items():
            if not matches_expected(expected, name, files.get(name, b"")):
                return False
        if not data["function"]:
            return True
        inputs = {
            "solution.py": files.get("solution.py", b""),
            "cases.json": json.dumps(data["cases"]).encode(),
        }
        run = self._execute(_CHECK_SCRIPT.format(function=data["function"], results=_RESULTS_FILE), inputs)
        return matches_expected(data["expected"], _RESULTS_FILE, run.files.get(_RESULTS_FILE, b""))

    def _draw_task(self, draw: random.Random) -> Task:
        family = self.spec.task if self.spec.task != "all" else draw.choice(list(FAMILIES))
        drawn: ToolTask = FAMILIES[family](draw)
        question = drawn.compact
        actions = [drawn.solution, f"{ANSWER_MARK}{drawn.answer}"]
        if not self._compact:
            question = _INSTRUCTIONS.format(files=", ".join(drawn.files), question=drawn.question)
            actions = [f"```python\n{drawn.solution}\n```", f"<answer>{drawn.answer}</answer>"]
        digest = hashlib.sha256(json.dumps([drawn.question, drawn.files]).encode()).hexdigest()
        data: dict[str, Any] = asdict(drawn) | {"family": family, "actions": actions}
        return Task(
            task_id=digest[:32],
            prompt=({"role": "user", "content": question},),
            data=data,
            difficulty=float(list(FAMILIES).index(family)),
        )


_WRITE_SCRIPT = """
import pathlib
path = pathlib.Path({path})
path.parent.mkdir(parents=True, exist_ok=True)
print(path.write_text({text}), "characters written")
"""
