"""The tasks that training draws from: without end, also where the environment has only so many."""

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
    """Tasks of the training split, batch after batch.

    First in the environment's own order. When it has no more, all of them come again, each epoch in an order
    drawn from (seed, epoch), so that a resumed run goes on with the very tasks it would have had. A batch may
    reach over the end of an epoch.

    Attributes:
        epoch: how often every task had been used before the one that was taken last.
        taken: how many were taken so far, by earlier attempts too.
    """

    def __init__(self, environment: Environment, workspace: Workspace, skip: int = 0) -> None:
        """Leave out the first `skip` tasks, which an earlier attempt has used."""
        self.epoch, self.taken = 0, skip
        self._environment, self._workspace = environment, workspace
        self._checker = EpochChecker(environment, workspace.job.seed, skip)
        self._stream = islice(self._endless(), skip, None)

    def take(self, size: int) -> list[Task]:
        """The next `size` tasks.

        Raises:
            RequestError: when the environment has no training tasks at all.
        """
        tasks = list(islice(self._stream, size))
        self.taken += len(tasks)
        return tasks

    def check(self, groups: Sequence[Sequence[Episode]], step: int) -> None:
        """Compare what was played with the environment's tasks.

        Raises:
            WorkFailedError: when a task comes again within an epoch.
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
        known = list(self._environment.tasks("train", seed))  # they are few, as it has come to an end
        for self.epoch in count(1):
            self._workspace.log(f"all {used} training tasks were used {self.epoch} times: again, reshuffled")
            self._workspace.event("epoch", epoch=self.epoch, tasks=used)
            for place in np.random.default_rng([seed, self.epoch]).permutation(len(known)):
                yield known[place]
