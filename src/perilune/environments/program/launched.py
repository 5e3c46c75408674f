"""The base of environments that start a program for each episode, with the tasks of another environment."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Literal

from pydantic import Field

from perilune.environments.core import registry
from perilune.environments.core.borrowed_tasks import BorrowedTasks
from perilune.environments.core.multi_turn import MultiTurn
from perilune.environments.core.protocol import EpisodeFailedError, Message, Observation, Split, Task
from perilune.environments.core.reference_answer import expected_answer
from perilune.environments.core.tasks_section import TasksSection
from perilune.errors import RequestError
from perilune.frozen import Frozen
from perilune.sandbox.programs import Ending, Program, ProgramLimits, Programs, Streams

TASK, FILE = "{task}", "{file}"  # in `command`


class LaunchSpec(Frozen):
    """The fields of an environment section about the program and its tasks."""

    tasks: TasksSection = Field(
        description="section of a single-turn environment: its prompts are the tasks; it scores answers"
    )
    command: tuple[str, ...] = Field(
        ("python", FILE),
        min_length=1,
        description="the program and its arguments; `python` stands for the interpreter that runs"
        " Perilune, {file} for `file`, and {task} for the text of the task",
    )
    file: str | None = Field(None, description="script of the program, or a folder that it needs")
    preload: tuple[str, ...] = Field(
        (), description="modules of a Python program to import once, so that episodes start faster"
    )
    variables: dict[str, str] = Field(default_factory=dict, description="environment variables; no secrets")
    seconds: float = Field(
        8.0, gt=0, description="time limit of the program for each turn; must be below `episodes.seconds`"
    )
    memory_mb: int = Field(
        4096, ge=64, description="maximum address space of each process of the program, in MiB"
    )
    parallel: int = Field(4, ge=1, le=256, description="maximum programs that run at the same time")
    on_crash: Literal["zero", "fail"] = Field(
        "zero",
        description="what happens to an episode whose program exits with an error or exceeds `seconds`:"
        " zero gives it reward 0, fail counts it as failed. An episode without a turn of the"
        " policy always fails",
    )
    confined: bool = Field(
        True,
        description="true: the program can access only its own folder, `file`, and files of Python and of"
        " the system, and can open TCP connections only to the gateway to the policy, if it"
        " has one",
    )


class LaunchedEnvironment(MultiTurn):
    """The base of such environments. The other environment scores in a process of its own.

    Args:
        sections: by name the section of the tasks, with the rewards and the prompting of this one.

    Raises:
        RequestError: when the tasks have several turns or players, or the command names a missing file.
    """

    files: ClassVar = ("file",)  # a bundle includes it
    confined = False  # it starts programs, which are confined

    def __init__(self, name: str, spec: LaunchSpec, sections: Mapping[str, Mapping[str, Any]]) -> None:
        self._launch = spec
        self.concurrent = spec.parallel
        if FILE in " ".join(spec.command) and spec.file is None:
            raise RequestError(
                "the command contains {file}, and `file` is not set",
                where="environment.file",
                remedy="set file",
            )
        self._lock = Lock()  # sessions play in several threads
        self._borrowed = BorrowedTasks(sections[registry.TASKS])
        self.id = f"{name}/{self._borrowed.environment.id}"
        self.check_files, self.characters = self._borrowed.check_files, self._borrowed.characters

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Yield the other environment's tasks. Their prompts become part of the first observation."""
        for task in self._borrowed.environment.tasks(split, seed):
            data = {"prompt": list(task.prompt), "data": dict(task.data)}
            yield Task(task.task_id, (), data, task.difficulty)

    def prompt(self, task: Task) -> tuple[Message, ...]:
        return tuple(task.data["prompt"])

    def expected_answer(self, task: Task) -> str:
        return expected_answer(self._borrowed.environment, self._source_task(task))

    def _source_task(self, task: Task) -> Task:
        return Task(task.task_id, self.prompt(task), task.data["data"], task.difficulty)

    def end_with_answer(
        self, task: Task, answer: str, metrics: Mapping[str, float] | None = None
    ) -> Observation:
        """Return the end of an episode with this answer.

        Raises:
            EpisodeFailedError: when it cannot be scored.
        """
        score = self._borrowed.score(self._source_task(task), answer)
        figures = {**score.metrics, **(metrics or {})}
        return Observation(rewards=(score.reward,), terms=score.terms, metrics=figures, done=True)

    def start(
        self,
        task: Task,
        streams: Streams,
        on_end: Callable[[Ending], None],
        variables: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> Program:
        """Start the program for a task; `variables` and `port` are those of the gateway."""
        spec = self._launch
        file = str(Path(spec.file).absolute()) if spec.file else ""
        placeholders = {TASK: self.prompt_text(task), FILE: file}
        with self._lock:
            programs = self._programs
        return programs.start(
            [_fill_placeholders(word, placeholders) for word in spec.command],
            streams,
            {**spec.variables, **(variables or {})},
            on_end,
            port=port,
            readable=[file] if file else [],
        )

    def prompt_text(self, task: Task) -> str:
        return "\n\n".join(message["content"] for message in self.prompt(task))

    def end_crashed(self, what: str, cause: str, *, is_data: bool) -> Observation:
        """Return the end of an episode whose program broke.

        Args:
            cause: of the metric contained/CAUSE.
            is_data: whether the policy has acted, so that `on_crash` applies.

        Raises:
            EpisodeFailedError: when the episode counts as failed.
        """
        if self._launch.on_crash == "fail" or not is_data:
            raise EpisodeFailedError("environment", what)
        return Observation(rewards=(0.0,), metrics={f"contained/{cause}": 1.0}, done=True)

    def close(self) -> None:
        self._borrowed.close()
        if "_programs" in vars(self):
            vars(self).pop("_programs").close()

    @cached_property
    def _programs(self) -> Programs:
        spec = self._launch
        limits = ProgramLimits(memory_bytes=spec.memory_mb << 20, confined=spec.confined)
        return Programs(limits, spec.preload)


def _fill_placeholders(word: str, placeholders: Mapping[str, str]) -> str:
    """Return the word with all placeholders replaced at once, because the text of a task may contain one."""
    names = "|".join(map(re.escape, placeholders))
    return re.sub(names, lambda name: placeholders[name[0]], word)
