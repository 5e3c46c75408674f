"""Chance inside an environment: every draw has a name, and the name alone decides it.

A generator with a state gives another number when one draw more was made before it. These draws are
functions of (seed, task, name): an episode that is played again, in whatever order, meets the same chance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_BITS = 53  # of a float's fraction


@dataclass(frozen=True, slots=True)
class KeyedRandom:
    """Random numbers of one session.

    Attributes:
        seed: of the session.
        task_id: of its task.
    """

    seed: int
    task_id: str

    def uniform(self, *name: Hashable) -> float:
        """A number in [0, 1), a multiple of 2**-53; `name` is any texts and integers, such as ("die", 3)."""
        key = "\x1f".join(map(str, (self.seed, self.task_id, *name)))
        drawn = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        return float(drawn >> (64 - _BITS)) / (1 << _BITS)

    def integer(self, below: int, *name: Hashable) -> int:
        """An integer in [0, below)."""
        return int(self.uniform(*name) * below)

    def choice(self, items: Sequence[T], *name: Hashable) -> T:
        """One of `items`."""
        return items[self.integer(len(items), *name)]

    def shuffled(self, items: Sequence[T], *name: Hashable) -> list[T]:
        """`items` in an order drawn uniformly."""
        return [items[i] for i in sorted(range(len(items)), key=lambda i: self.uniform(*name, i))]
