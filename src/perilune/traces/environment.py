"""The environment `suite`: the policy plays the tasks of a suite of recorded episodes."""

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from perilune.environments.core.episode_settings import EPISODES_KEY as EPISODES
from perilune.environments.core.mixture import Mixture, MixtureSpec, named_task, split_task
from perilune.environments.core.protocol import Split, Task
from perilune.environments.core.registry import MIXTURE, part_sections
from perilune.environments.core.rewards import GOLD_METRIC
from perilune.errors import RequestError
from perilune.frozen import Frozen
from perilune.traces.cassette import Cassette, environment_digest
from perilune.traces.suite import Part, Suite


class SuiteSpec(Frozen):
    """The environment section of a recipe, for `id: suite`."""

    id: Literal["suite"] = Field("suite", description="id of the environment")
    path: str = Field(
        description="folder that `perilune traces suite` wrote, relative to the recipe. A suite contains"
        " code of environments, which the stage runs: use only suites that you trust as much"
        " as a recipe"
    )
    part: Part = Field("all", description="the cases to evaluate on; training always uses the shown cases")


class SuiteEnvironment(Mixture):
    """The tasks of all cassettes, each once, in the environments in which they were recorded.

    Raises:
        RequestError: when the folder is no suite, or was recorded in a game of several players.
    """

    Spec = SuiteSpec  # type: ignore[assignment]
    files: ClassVar = ("path",)

    def __init__(self, spec: SuiteSpec) -> None:
        self.suite = Suite(Path(spec.path))
        self._part = spec.part
        sections: dict[str, Mapping[str, Any]] = {}
        self._tasks: dict[str, Task] = {}
        self._recorded: dict[str, list[float]] = defaultdict(list)
        for cassette in self.suite.cassettes.values():
            name, section, task = _recorded_task(cassette)
            sections[name] = section
            self._tasks[cassette.digest] = task
            verdict = cassette.tracks[0].verdict if cassette.tracks else None
            if verdict is not None and verdict.reward is not None:
                self._recorded[task.task_id].append(verdict.metrics.get(GOLD_METRIC, verdict.reward))
        super().__init__(MixtureSpec.model_validate({"parts": sections}), sections)
        self.id = f"suite/{Path(spec.path).name}"

    def check_files(self) -> None:
        """Check that the part has cases."""
        if not self.suite.cases(self._part):
            raise RequestError(f"the suite has no cases in the part {self._part}", where="environment.part")

    def settings(self) -> dict[str, Any]:
        """Return the number of tasks to evaluate."""
        return {"heldout": sum(1 for _ in self.tasks("heldout", 0))}

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Yield each task of the part once, shuffled by `seed`; in training none of a held-out case."""
        cases = self.suite.cases("shown" if split == "train" else self._part)
        tasks = {task.task_id: task for task in (self._tasks[case.digest] for case in cases)}
        reserved = self.suite.cases("held-out") if split == "train" else ()
        names = sorted(tasks.keys() - {self._tasks[case.digest].task_id for case in reserved})
        random.Random(f"suite/{seed}").shuffle(names)
        yield from (tasks[name] for name in names)

    def recorded(self) -> dict[str, list[float]]:
        """Return the scores of the recorded episodes by task, without those that failed."""
        return dict(self._recorded)


def _recorded_task(cassette: Cassette) -> tuple[str, Mapping[str, Any], Task]:
    """Return the name and section of a cassette's environment, and the task, which contains the name."""
    section, task = cassette.environment, cassette.task.task()
    if section.get("id") == MIXTURE:
        part, task = split_task(task)
        section = part_sections(section)[part]
    section = {key: value for key, value in section.items() if key != EPISODES}
    readable = re.sub(r"[^A-Za-z0-9]+", "-", f"{section['id']}-{section.get('task') or ''}").strip("-")
    name = f"env-{readable[:40]}-{environment_digest(section)[:6]}"
    return name, section, named_task(name, task)
