"""Within an epoch no task comes again, unless the environment itself has it several times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from perilune.data.episode import Episode
from perilune.environments.core.protocol import Environment
from perilune.errors import REPORT_BUG, WorkFailedError


class EpochChecker:
    """Follows the tasks of a run, and asks the environment for its own only when one comes again.

    Args:
        seed: of the run, with which the environment makes its tasks.
        taken: tasks that earlier attempts have used; that one of those comes again is seen from the next
            epoch on.
    """

    def __init__(self, environment: Environment, seed: int, taken: int) -> None:
        self._source: Iterator[str] = (one.task_id for one in environment.tasks("train", seed))
        self._own: list[str] = []  # the environment's tasks, as far as they were asked for
        self._size: int | None = None  # tasks of an epoch, once its end was seen
        self._place = taken
        self._epoch: list[str] = []  # tasks of this epoch so far
        self._seen: Counter[str] = Counter()

    def check(self, groups: Sequence[Sequence[Episode]], step: int) -> None:
        """Count the tasks of a step, which come in the order in which they were taken.

        Raises:
            WorkFailedError: naming a task that comes again within its epoch.
        """
        tasks = {one.group_id.partition("/p")[0]: one.task_id for group in groups for one in group[:1]}
        for task in tasks.values():
            if self._seen[task]:
                self._look_up(self._place + 1)
            self._begin_epoch()
            if self._seen[task] and self._is_wrong(task):
                raise WorkFailedError(
                    f"task {task} comes again within its epoch: the run learns from the same tasks",
                    where=f"step {step}",
                    remedy=REPORT_BUG,
                )
            self._seen[task] += 1
            self._epoch.append(task)
            self._place += 1

    def _look_up(self, count: int) -> None:
        """Ask the environment for its first `count` tasks, or all."""
        while self._size is None and len(self._own) < count:
            task = next(self._source, None)
            if task is None:
                self._size = len(self._own)
            else:
                self._own.append(task)

    def _begin_epoch(self) -> None:
        """Forget the tasks of earlier epochs."""
        if self._size and len(self._epoch) > (since := self._place % self._size):
            self._epoch = self._epoch[len(self._epoch) - since :]
            self._seen = Counter(self._epoch)

    def _is_wrong(self, task: str) -> bool:
        """Whether the environment does not have `task` here, or as often."""
        if self._place < len(self._own):
            return self._own[self._place] != task
        return self._seen[task] >= self._own.count(task)
