"""Random numbers for environments, each computed from the seed, the task and a name.

A stateful generator returns a different number if one more draw came before. These draws have no state: a
replayed episode sees the same random numbers in any order of draws.
"""

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_MANTISSA_BITS = 53  # fraction of a double


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
        """Draw a float in [0, 1), a multiple of 2**-53, for a name such as "die", 3."""
        key = "\x1f".join(map(str, (self.seed, self.task_id, *name)))
        bits = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        return float(bits >> (64 - _MANTISSA_BITS)) / (1 << _MANTISSA_BITS)

    def integer(self, below: int, *name: Hashable) -> int:
        """Return an integer in [0, below)."""
        return int(self.uniform(*name) * below)

    def choice(self, items: Sequence[T], *name: Hashable) -> T:
        """Return a uniformly drawn element of `items`."""
        return items[self.integer(len(items), *name)]

    def shuffled(self, items: Sequence[T], *name: Hashable) -> list[T]:
        """Return a uniformly drawn permutation of `items`."""
        return [items[i] for i in sorted(range(len(items)), key=lambda i: self.uniform(*name, i))]
