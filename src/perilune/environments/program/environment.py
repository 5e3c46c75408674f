"""The environment `program`: episodes are runs of an agent program, whose model is the policy.

Each episode starts the program anew, confined (`perilune.sandbox.programs`). OPENAI_BASE_URL leads to a
gateway in this process. Every call of the program is a turn of the policy, and the environment of `tasks`
scores what the program answers at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from perilune.environments.core import registry
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn
from perilune.environments.core.protocol import (
    EpisodeFailedError,
    Failure,
    Observation,
    Split,
    Task,
    Transcript,
)
from perilune.environments.program.chat import ChatAnswer, Said
from perilune.environments.program.gateway import Call, Gateway
from perilune.errors import RequestError
from perilune.sandbox.programs import Ending, ProgramLimits, Programs

if TYPE_CHECKING:
    from perilune.verifiers.scorer import Scorer

TASK, FILE = "{task}", "{file}"  # in `command`


class ProgramSpec(BaseModel):
    """The environment section of a recipe, for `id: program`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Literal["program"] = Field("program", description="id of the environment")
    tasks: dict[str, Any] = Field(
        description="section of a single-turn environment: its prompts are the program's tasks, and it scores"
        " the program's answers"
    )
    command: tuple[str, ...] = Field(
        ("python", FILE),
        min_length=1,
        description="the program and its arguments; python is this interpreter, {file} is `file`, and {task}"
        " is the text of the task, which is also the standard input",
    )
    file: str | None = Field(None, description="script of the program, or a folder that it needs")
    preload: tuple[str, ...] = Field(
        (), description="modules of a Python program to import once, so that episodes start faster"
    )
    variables: dict[str, str] = Field(default_factory=dict, description="environment variables; no secrets")
    answer: Literal["output", "last_line", "reply"] = Field(
        "output", description="what is scored: the standard output, its last line, or the model's last reply"
    )
    stop: tuple[str, ...] = Field((), description="texts that end a reply; the program may name only these")
    turns: int = Field(16, ge=1, le=1000, description="maximum calls of an episode")
    seconds: float = Field(
        8.0, gt=0, description="time limit of the program between two calls; must be below `episodes.seconds`"
    )
    memory_mb: int = Field(4096, ge=64, description="address space of each process of the program, MiB")
    parallel: int = Field(4, ge=1, le=256, description="programs that compute at the same time")
    on_crash: Literal["zero", "fail"] = Field(
        "zero",
        description="episode of a program that exits with an error or exceeds `seconds`: reward 0, or failed",
    )
    confined: bool = Field(
        True,
        description="deny the program other files than Python's, the system's and its own, and all TCP ports"
        " but the gateway's",
    )


class ProgramEnvironment(MultiTurn):
    """Runs of one program. A program that ends without a call is a failure, whatever `on_crash` says.

    Raises:
        RequestError: when `tasks` has several turns, or the machine cannot confine programs.
    """

    Spec = ProgramSpec
    files: ClassVar = ("file",)  # a bundle includes it
    confined = False  # it starts programs, which are confined

    def __init__(self, spec: ProgramSpec, sections: Mapping[str, Mapping[str, Any]]) -> None:
        self.spec = spec
        self._section = sections[registry.TASKS]  # with the rewards and the prompting of the whole
        self.max_turns = spec.turns
        self.concurrent = spec.parallel
        self.stop_texts = spec.stop
        if FILE in " ".join(spec.command) and spec.file is None:
            raise RequestError(
                "the command names {file}, and there is no file", where="environment.file", remedy="set file"
            )
        self._lock = Lock()  # sessions play in several threads
        self._tasks = registry.make_environment(self._section, checked=False)
        if getattr(self._tasks, "max_turns", 1) > 1 or getattr(self._tasks, "players", 1) > 1:
            raise RequestError(
                f"{self._tasks.id} has several turns; a program needs tasks with one answer",
                where="environment.tasks.id",
            )
        self.id = f"program/{self._tasks.id}"

    def check_files(self) -> None:
        """Check the files of the tasks."""
        if hasattr(self._tasks, "check_files"):
            self._tasks.check_files()

    def characters(self) -> dict[str, str]:
        """The characters of the tasks."""
        found: dict[str, str] = getattr(self._tasks, "characters", dict)()
        return found

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """The tasks of the other environment. The policy sees no prompt but what the program writes."""
        for task in self._tasks.tasks(split, seed):
            data = {"prompt": list(task.prompt), "data": dict(task.data)}
            yield Task(task.task_id, (), data, task.difficulty)

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        """Run the program. Its calls are turns."""
        with self._lock:
            gateway, programs = self._gateway, self._programs
        run = _Run(self.spec, gateway, programs, _text(task.data["prompt"]))
        seen: tuple[Said, ...] = ()
        turns, reply = 0, ""
        try:
            while isinstance(event := run.next(), Call):
                said = event.request.said
                if said[: len(seen)] != seen or len(said) == len(seen):
                    raise EpisodeFailedError("environment", "the program changed earlier messages")
                self._require_known(event.request.stop)
                action = yield Observation(tuple(one.message() for one in said[len(seen) :]))
                reply = _before(action, event.request.stop)
                answer = ChatAnswer(event.request, turns, reply)
                seen, turns = (*said, answer.said), turns + 1
                event.reply.put(answer)
        finally:
            run.close()
        yield self._end(task, event, turns, reply)

    def close(self) -> None:
        """End all programs, the gateway and the scorer."""
        for name in ("_programs", "_gateway", "_scorer"):
            if name in vars(self):
                vars(self).pop(name).close()

    def _end(self, task: Task, ending: Ending | None, turns: int, reply: str) -> Observation:
        if ending is None or ending.code:
            cause = "timeout" if ending is None else "crash"
            what = _described(ending, self.spec.seconds)
            if self.spec.on_crash == "fail" or not turns:
                raise EpisodeFailedError("environment", what)
            return Observation(rewards=(0.0,), metrics={f"contained/{cause}": 1.0}, done=True)
        if not turns:
            raise EpisodeFailedError("environment", "the program ended without a call of the model")
        output = ending.output.strip()
        lines = output.splitlines()[-1:]
        text = {"output": output, "last_line": "".join(lines), "reply": reply}[self.spec.answer]
        data = task.data
        inner = Task(task.task_id, tuple(data["prompt"]), data["data"], task.difficulty)
        with self._lock:
            (outcome,) = self._scorer.score([(inner, Transcript(text))])
        if isinstance(outcome, Failure):
            raise EpisodeFailedError(outcome.boundary, outcome.reason)
        return Observation(rewards=(outcome.reward,), terms=outcome.terms, metrics=outcome.metrics, done=True)

    def _require_known(self, stop: Sequence[str]) -> None:
        unknown = [text for text in stop if text not in self.spec.stop]
        if unknown:
            raise EpisodeFailedError(
                "environment", f"the program wants replies to end at {unknown}: add it to environment.stop"
            )

    @cached_property
    def _gateway(self) -> Gateway:
        return Gateway()

    @cached_property
    def _programs(self) -> Programs:
        return Programs(
            ProgramLimits(memory_bytes=self.spec.memory_mb << 20, confined=self.spec.confined),
            self.spec.preload,
        )

    @cached_property
    def _scorer(self) -> Scorer:
        from perilune.verifiers.scorer import Scorer

        return Scorer(self._section)


class _Run:
    """One run of the program."""

    def __init__(self, spec: ProgramSpec, gateway: Gateway, programs: Programs, task: str) -> None:
        self._seconds, self._gateway = spec.seconds, gateway
        self._events: SimpleQueue[Call | Ending] = SimpleQueue()
        self._key = gateway.open(self._events.put)
        url = f"http://127.0.0.1:{gateway.port}/{self._key}/v1"
        names = {"OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, "OPENAI_API_KEY": "perilune"}
        places = {TASK: task, FILE: spec.file or ""}
        try:
            self._program = programs.start(
                [_filled(word, places) for word in spec.command],
                task,
                {**spec.variables, **names},
                gateway.port,
                [str(Path(spec.file).absolute())] if spec.file else [],
                self._events.put,
            )
        except BaseException:
            gateway.close_session(self._key)
            raise

    def next(self) -> Call | Ending | None:
        """The next call, or the end of the program; None when neither comes in time."""
        with contextlib.suppress(Empty):
            return self._events.get(timeout=self._seconds)
        return None

    def close(self) -> None:
        """End the program."""
        self._gateway.close_session(self._key)
        self._program.end()


def _filled(word: str, places: Mapping[str, str]) -> str:
    for name, value in places.items():
        word = word.replace(name, value)
    return word


def _text(prompt: Sequence[Mapping[str, str]]) -> str:
    return "\n\n".join(message["content"] for message in prompt)


def _before(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the stop texts."""
    return text[: min((place for one in stop if (place := text.find(one)) >= 0), default=len(text))]


def _described(ending: Ending | None, seconds: float) -> str:
    if ending is None:
        return f"the program neither called the model nor ended within {seconds:g} s"
    last = ending.errors.strip().splitlines()[-1:]
    return f"the program ended with exit code {ending.code}" + (f": {last[0]}" if last else "")
