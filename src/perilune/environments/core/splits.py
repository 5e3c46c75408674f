"""Assigns tasks to the training and the held-out split by a digest of the task."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

from perilune.environments.core.protocol import Split

T = TypeVar("T")
HELD_OUT_DIVISOR = 10  # one tenth of all digests is held out
MAX_REJECTED_DRAWS = 1000  # consecutive draws without a new task, after which a generator counts as exhausted


def assign_split(digest: str) -> Split:
    return "heldout" if int(digest[:8], 16) % HELD_OUT_DIVISOR == 0 else "train"


def generate_task_ids(name: str, split: Split, seed: int) -> Iterator[str]:
    """Yield an endless sequence of task ids of a split, for tasks that differ only in their random draws."""
    for number in itertools.count():
        task_id = hashlib.sha256(f"{name}/{seed}/{number}".encode()).hexdigest()[:32]
        if assign_split(task_id) == split:
            yield task_id


def select_unique(split: Split, drawn: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Yield the pairs of a split whose digest is new, until `MAX_REJECTED_DRAWS` draws in a row add none.

    Args:
        drawn: an endless sequence of digests, each with what was drawn.
    """
    digests: set[str] = set()
    rejected = 0
    for digest, value in drawn:
        if digest not in digests and assign_split(digest) == split:
            digests.add(digest)
            rejected = 0
            yield digest, value
        elif (rejected := rejected + 1) == MAX_REJECTED_DRAWS:
            return
