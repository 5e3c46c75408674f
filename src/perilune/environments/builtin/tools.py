"""Tasks with tools: the policy writes Python, which runs in a sandbox on small files, and then answers.

Each call begins a fresh process in which only the files of the episode are as the last one left them: nothing
hides in an interpreter, an episode played again is the same, and a run that has to be killed leaves nothing.
What was right is decided outside the sandbox, from the answer and the files.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from perilune.environments.builtin.tool_calls import ANSWER_MARK, Answer, Call, Misunderstood, read_action
from perilune.environments.builtin.tool_tasks import FAMILIES, ToolTask, is_right
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn, ask, end_episode
from perilune.environments.core.protocol import EpisodeFailedError, Outcome, Score, Split, Task, Transcript
from perilune.environments.core.replay import conversation
from perilune.errors import PeriluneError
from perilune.sandbox import Execution, Sandbox, SandboxLimits

HELD_OUT_PARTS = 10  # one tenth of all tasks is held out
_MISSES = 1000  # tasks drawn in a row that were there already, until there are no more
_COMPACT_OUTPUT = 24  # characters of the last word, which is all that a compact prompt tells
_RESULTS = "results.json"
_INSTRUCTIONS = """\
You work in a folder with these files: {files}.
To run Python there, write one fenced block of it and nothing after it; you are told what it prints. It begins
anew every time, with the files as they are. There are tools, too: list_files, read_file (path), write_file
(path, text) and python (code), called like this:
<tool_call>{{"name": "read_file", "arguments": {{"path": "..."}}}}</tool_call>
When you are done, answer with <answer>...</answer>.

{question}"""
_CHECK = """
import json, solution
cases = json.load(open("cases.json"))
results = [getattr(solution, {function!r})(*case) for case in cases]
json.dump(results, open({results!r}, "w"))
"""


class SandboxSpec(BaseModel):
    """What a run of the policy's code may use."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: float = Field(2.0, gt=0, le=60, description="wall clock; less than `episodes.seconds`")
    memory_mb: int = Field(256, ge=16, description="of all its processes together")
    processes: int = Field(4, ge=1, le=64, description="processes and threads at a time")
    scratch_mb: int = Field(4, ge=1, le=256, description="size of its folder")
    output: int = Field(2000, ge=64, le=1 << 20, description="characters of output that the policy is told")
    twice: bool = Field(False, description="run all code twice, and count what differs as `unsteady`")
    allow_missing: tuple[str, ...] = Field(
        (), description="walls that this machine may lack; by default, where one is missing, nothing is run"
    )

    def limits(self) -> SandboxLimits:
        """As the sandbox takes them."""
        return SandboxLimits(
            seconds=self.seconds,
            cpu_seconds=max(int(self.seconds + 1), 1),
            memory_bytes=self.memory_mb << 20,
            processes=self.processes,
            scratch_bytes=self.scratch_mb << 20,
            output_bytes=self.output,
        )


class ToolsSpec(BaseModel):
    """The environment section of a recipe, for `id: tools`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Literal["tools"] = Field("tools", description="which environment this is")
    task: Literal["all", "figure", "column", "best", "clean", "transform", "repair"] = Field(
        "all", description="the family of tasks"
    )
    prompt: Literal["natural", "compact"] = Field(
        "natural", description="compact: a few characters, for the family figure and tiny models"
    )
    turns: int = Field(6, ge=1, le=32, description="most turns of an episode")
    sandbox: SandboxSpec = Field(default_factory=SandboxSpec, description="what the policy's code may use")

    @model_validator(mode="after")
    def _has_a_compact_form(self) -> ToolsSpec:
        if self.prompt == "compact" and self.task != "figure":
            raise ValueError("only the family figure has a compact prompt: task: figure")
        return self


class ToolsEnvironment(MultiTurn):
    """Reward 1 for what is right in the end, however it came about."""

    Spec = ToolsSpec
    confined = False  # it starts a sandbox, in which all that is not trusted runs

    def __init__(self, spec: ToolsSpec) -> None:
        self.spec = spec
        self.id = f"tools/{spec.task}"
        self.max_turns = spec.turns
        self._compact = spec.prompt == "compact"
        self._sandbox = Sandbox(spec.sandbox.limits(), allow_missing=spec.sandbox.allow_missing)

    @staticmethod
    def families() -> tuple[str, ...]:
        """Families of tasks."""
        return ("all", *FAMILIES)

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Tasks drawn one by one from (seed, index), as long as there are new ones."""
        seen: set[str] = set()
        index = misses = 0
        while misses < _MISSES:
            task = self._task(random.Random(f"tools/{seed}/{index}"))
            index, misses = index + 1, misses + 1
            held_out = int(task.task_id[:8], 16) % HELD_OUT_PARTS == 0
            if task.task_id not in seen and held_out == (split == "heldout"):
                misses = 0
                seen.add(task.task_id)
                yield task

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        """Calls until there is an answer."""
        files: Mapping[str, bytes] = {name: text.encode() for name, text in task.data["files"].items()}
        counts: dict[str, float] = {"calls": 0.0}
        asked = read_action((yield ask()), compact=self._compact)
        while not isinstance(asked, Answer):
            said, files = self._answer(asked, files, counts)
            asked = read_action((yield ask(said, role="tool")), compact=self._compact)
        right = float(self._is_right(task, asked.text, files))
        strategy = "tools" if counts["calls"] else "guess"
        yield end_episode(right, terms={"right": right}, metrics={f"strategy/{strategy}": 1.0, **counts})

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        """Play it again; beside a conversation that was kept, tell whether it differs (`replay_differs`)."""
        outcome = super().score(task, transcript)
        if not transcript.messages or not isinstance(outcome, Score):
            return outcome
        differs = float(conversation(self, task, transcript) != tuple(transcript.messages))
        return Score(outcome.reward, outcome.terms, {**outcome.metrics, "replay_differs": differs})

    def gold(self, task: Task) -> Transcript:
        """The solution, then the answer."""
        *earlier, answer = task.data["actions"]
        return Transcript(answer, earlier=tuple(earlier))

    def close(self) -> None:
        """End the sandbox."""
        self._sandbox.close()

    def _answer(
        self, asked: Call | Misunderstood, files: Mapping[str, bytes], counts: dict[str, float]
    ) -> tuple[str, Mapping[str, bytes]]:
        """What the policy is told, and the files as they are then."""
        if isinstance(asked, Misunderstood):
            return self._told(f"error: {asked.why}"), files
        counts["calls"] += 1.0
        arguments = asked.arguments
        match asked.name:
            case "list_files":
                return self._told("\n".join(sorted(files))), files
            case "read_file":
                content = files.get(arguments["path"])
                said = "error: no such file" if content is None else content.decode(errors="replace")
                return self._told(said[: self.spec.sandbox.output]), files
            case "write_file":
                return self._run(
                    _WRITE.format(**{name: repr(text) for name, text in arguments.items()}), files, counts
                )
            case _:
                return self._run(arguments["code"], files, counts)

    def _run(
        self, code: str, files: Mapping[str, bytes], counts: dict[str, float]
    ) -> tuple[str, Mapping[str, bytes]]:
        found = self._execute(code, files)
        if self.spec.sandbox.twice:
            again = self._execute(code, files)
            if (again.output, again.files) != (found.output, found.files):
                counts["unsteady"] = counts.get("unsteady", 0.0) + 1.0
        if found.cause not in ("", "error"):
            counts[f"contained/{found.cause}"] = counts.get(f"contained/{found.cause}", 0.0) + 1.0
        ended = f"[ended: {found.cause}]\n" if found.cause not in ("", "error") else ""
        return self._told(found.output + ended), found.files

    def _execute(self, code: str, files: Mapping[str, bytes]) -> Execution:
        """Run code in the sandbox; that it fails is no fault of the policy.

        Raises:
            EpisodeFailedError: when the sandbox fails, or lacks a wall.
        """
        try:
            return self._sandbox.run(code, files)
        except PeriluneError as error:
            raise EpisodeFailedError("sandbox", error.what) from None

    def _told(self, said: str) -> str:
        if self._compact:
            *_, last = ["", *said.split()]
            return f"={last[:_COMPACT_OUTPUT]}\n"
        return said or "(no output)"

    def _is_right(self, task: Task, answer: str, files: Mapping[str, bytes]) -> bool:
        data = task.data
        if answer != data["answer"]:
            return False
        for name, wanted in data["outputs"].items():
            if not is_right(wanted, name, files.get(name, b"")):
                return False
        if not data["function"]:
            return True
        given = {
            "solution.py": files.get("solution.py", b""),
            "cases.json": json.dumps(data["cases"]).encode(),
        }
        found = self._execute(_CHECK.format(function=data["function"], results=_RESULTS), given)
        return is_right(data["expected"], _RESULTS, found.files.get(_RESULTS, b""))

    def _task(self, draw: random.Random) -> Task:
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


_WRITE = """
import pathlib
path = pathlib.Path({path})
path.parent.mkdir(parents=True, exist_ok=True)
print(path.write_text({text}), "characters written")
"""
