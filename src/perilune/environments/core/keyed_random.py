"""Random numbers for environments, each computed from the seed, the task and a name.

A stateful generator returns a different number if one more draw came before. These draws have no state: a
replayed episode sees the same random numbers, whatever was drawn before and in whatever order.
"""

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_BITS = 53  # fraction of a double


@dataclass(frozen=True, slots=True)
class KeyedRandom:
    """The random numbers of one session.

    Attributes:
        seed: seed of the session.
        task_id: id of the session's task.
    """

    seed: int
    task_id: str

    def uniform(self, *name: Hashable) -> float:
        """A float in [0, 1), a multiple of 2**-53. `name` is any sequence of strings and integers, such as
        ("die", 3).
        """
        key = "\x1f".join(map(str, (self.seed, self.task_id, *name)))
        drawn = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        return float(drawn >> (64 - _BITS)) / (1 << _BITS)

    def integer(self, below: int, *name: Hashable) -> int:
        """An integer in [0, below)."""
        return int(self.uniform(*name) * below)

    def choice(self, items: Sequence[T], *name: Hashable) -> T:
        """A uniformly drawn element of `items`."""
        return items[self.integer(len(items), *name)]

    def shuffled(self, items: Sequence[T], *name: Hashable) -> list[T]:
        """A uniformly drawn permutation of `items`."""
        return [items[i] for i in sorted(range(len(items)), key=lambda i: self.uniform(*name, i))]
