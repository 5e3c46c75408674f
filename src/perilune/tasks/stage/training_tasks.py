"""An endless stream of training tasks; a finite set of tasks is reshuffled in every epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice

import numpy as np

from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.environments.core.protocol import Environment, Task
from perilune.errors import RequestError
from perilune.tasks.checks.epochs import EpochChecker


class TrainingTasks:
    """Batches of tasks of the training split.

    The first epoch has the environment's order. Later epochs have an order drawn from (seed, epoch), so a
    resumed run continues with the same tasks. A batch may span two epochs.

    Args:
        skip: number of tasks that earlier attempts have used.

    Attributes:
        epoch: number of completed epochs before the task taken last.
        taken: number of tasks taken so far, with those of earlier attempts.
    """

    def __init__(self, environment: Environment, workspace: Workspace, skip: int = 0) -> None:
        self.epoch, self.taken = 0, skip
        self._environment, self._workspace = environment, workspace
        self._checker = EpochChecker(environment, workspace.job.seed, skip)
        self._stream = islice(self._endless(), skip, None)

    def take(self, size: int) -> list[Task]:
        """The next `size` tasks.

        Raises:
            RequestError: when the environment has no training tasks.
        """
        tasks = list(islice(self._stream, size))
        self.taken += len(tasks)
        return tasks

    def check(self, groups: Sequence[Sequence[Episode]], step: int) -> None:
        """Check that the groups of a step repeat no task.

        Raises:
            WorkFailedError: when a task repeats within an epoch.
        """
        self._checker.check(groups, step)

    def _endless(self) -> Iterator[Task]:
        seed = self._workspace.job.seed
        used = 0
        for task in self._environment.tasks("train", seed):
            used += 1
            yield task
        if not used:
            raise RequestError(f"{self._environment.id} has no training tasks", remedy="widen its config")
        known = list(self._environment.tasks("train", seed))  # a finite set fits in memory
        for self.epoch in count(1):
            self._workspace.log(f"epoch {self.epoch + 1} of the {used} training tasks, reshuffled")
            self._workspace.event("epoch", epoch=self.epoch, tasks=used)
            for index in np.random.default_rng([seed, self.epoch]).permutation(len(known)):
                yield known[index]
