"""Assigns tasks to the training and the held-out split by a digest of the task."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

from perilune.environments.core.protocol import Split

T = TypeVar("T")
HELD_OUT_PARTS = 10  # one tenth of all digests is held out
MOST_REJECTED = 1000  # consecutive draws without a new task, after which a generator counts as exhausted


def split_of(digest: str) -> Split:
    """The split of a hexadecimal digest."""
    return "heldout" if int(digest[:8], 16) % HELD_OUT_PARTS == 0 else "train"


def numbered_ids(name: str, split: Split, seed: int) -> Iterator[str]:
    """Yield an endless sequence of task ids of a split, for tasks that differ only in their random draws."""
    for number in itertools.count():
        task_id = hashlib.sha256(f"{name}/{seed}/{number}".encode()).hexdigest()[:32]
        if split_of(task_id) == split:
            yield task_id


def new_draws(split: Split, drawn: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Yield the pairs of a split whose digest is new, until `MOST_REJECTED` draws in a row add none.

    Args:
        drawn: an endless sequence of digests, each with what was drawn.
    """
    seen: set[str] = set()
    rejected = 0
    for digest, value in drawn:
        if digest not in seen and split_of(digest) == split:
            seen.add(digest)
            rejected = 0
            yield digest, value
        elif (rejected := rejected + 1) == MOST_REJECTED:
            return
