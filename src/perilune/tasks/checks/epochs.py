"""The epoch check: no task repeats within an epoch, unless the environment itself repeats it."""

from collections import Counter
from collections.abc import Iterator, Sequence

from perilune.data.episode import Episode
from perilune.environments.core.protocol import Environment
from perilune.errors import REPORT_BUG, WorkFailedError


class EpochChecker:
    """Counts the tasks of a run. When a task repeats, compares them with the environment's tasks.

    Args:
        seed: the run's seed, which determines the environment's tasks.
        taken: number of tasks that earlier attempts have used. Repeats of these tasks are noticed only in the
            next epoch.
    """

    def __init__(self, environment: Environment, seed: int, taken: int) -> None:
        self._source: Iterator[str] = (task.task_id for task in environment.tasks("train", seed))
        self._expected: list[str] = []  # the environment's first tasks, generated when needed
        self._size: int | None = None  # tasks of an epoch, once known
        self._place = taken
        self._epoch: list[str] = []  # tasks of this epoch so far
        self._seen: Counter[str] = Counter()

    def check(self, groups: Sequence[Sequence[Episode]], step: int) -> None:
        """Count the tasks of a step, in the order in which they were taken.

        Raises:
            WorkFailedError: naming a task that repeats within its epoch.
        """
        tasks = {
            tuple(episode.group_id.split("/")[:2]): episode.task_id
            for group in groups
            for episode in group[:1]
        }
        for task in tasks.values():
            if self._seen[task]:
                self._generate(self._place + 1)
            self._start_epoch()
            if self._seen[task] and self._is_wrong_repeat(task):
                message = f"task {task} repeats within its epoch: the run trains on the same tasks again"
                raise WorkFailedError(message, where=f"step {step}", remedy=REPORT_BUG)
            self._seen[task] += 1
            self._epoch.append(task)
            self._place += 1

    def _generate(self, count: int) -> None:
        """Generate the environment's first `count` tasks, or all if it has fewer."""
        while self._size is None and len(self._expected) < count:
            task = next(self._source, None)
            if task is None:
                self._size = len(self._expected)
            else:
                self._expected.append(task)

    def _start_epoch(self) -> None:
        """Forget the tasks of earlier epochs."""
        if self._size and len(self._epoch) > (since := self._place % self._size):
            self._epoch = self._epoch[len(self._epoch) - since :]
            self._seen = Counter(self._epoch)

    def _is_wrong_repeat(self, task: str) -> bool:
        """Return whether the environment has another task here, or has `task` less often."""
        if self._place < len(self._expected):
            return self._expected[self._place] != task
        return self._seen[task] >= self._expected.count(task)
