"""An endless stream of training tasks; a finite set of tasks is reshuffled in every epoch."""

from collections.abc import Sequence
from itertools import islice

from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.environments.core.epochs import endless_tasks
from perilune.environments.core.protocol import Environment, Task
from perilune.tasks.checks.epochs import EpochChecker


class TrainingTasks:
    """Supplies batches of tasks of the training split.

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
        self._workspace = workspace
        self._checker = EpochChecker(environment, workspace.job.seed, skip)
        stream = endless_tasks(environment, workspace.job.seed, self._start_epoch)
        self._stream = islice(stream, skip, None)

    def take(self, size: int) -> list[Task]:
        """Return the next `size` tasks.

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

    def _start_epoch(self, epoch: int, tasks: int) -> None:
        self.epoch = epoch
        self._workspace.log(f"epoch {epoch + 1} of the {tasks} training tasks, reshuffled")
        self._workspace.event("epoch", epoch=epoch, tasks=tasks)
