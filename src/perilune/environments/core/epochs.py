"""An endless sequence of tasks: a finite set of tasks is reshuffled in every epoch."""

from collections.abc import Callable, Iterator
from itertools import count

import numpy as np

from perilune.environments.core.protocol import Environment, Task
from perilune.errors import RequestError


def endless_tasks(
    environment: Environment, seed: int, on_epoch: Callable[[int, int], None] = lambda epoch, tasks: None
) -> Iterator[Task]:
    """Yield the training tasks forever.

    The first epoch has the environment's order. The order of each later epoch is drawn from (seed, epoch).

    Args:
        on_epoch: called at the start of each epoch but the first, with its number from 1 and the number of
            tasks.

    Raises:
        RequestError: when the environment has no training tasks.
    """
    task_count = 0
    for task in environment.tasks("train", seed):
        task_count += 1
        yield task
    if not task_count:
        raise RequestError(f"{environment.id} has no training tasks", remedy="widen its config")
    tasks = list(environment.tasks("train", seed))  # a finite set fits in memory
    for epoch in count(1):
        on_epoch(epoch, task_count)
        for index in np.random.default_rng([seed, epoch]).permutation(len(tasks)):
            yield tasks[index]
