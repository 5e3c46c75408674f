"""Bounds on the differences between the engine's and the learner's log-probs of one policy.

In float32 on a CPU they are equal, so each token is checked. With bfloat16 products on a GPU, another order
of summation changes a log-prob by about 0.01 nats, and the largest of a million differences says nothing:
there the mean and the KL divergence decide, and the largest is only reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Rounding:
    """Bounds on differences of log-probs, in nats.

    Attributes:
        largest: of one token.
        mean: mean absolute difference.
        kl: KL(sampler || learner) per token, by k3 (Schulman 2020).
        missed: share of draws from the cumulative distribution that may fall to another token.
    """

    largest: float
    mean: float = math.inf
    kl: float = math.inf
    missed: float = 0.0

    def allows(self, differences: NDArray[np.float64]) -> bool:
        """Return whether differences float64[N], sampler minus learner, are within the bounds. NaN is not."""
        import numpy as np  # commands that only read the bounds need not load it

        if not len(differences):
            return True
        sizes = np.abs(differences)
        k3 = np.expm1(-differences) + differences
        return self.allows_statistics(float(sizes.max()), float(sizes.mean()), float(k3.mean()))

    def allows_statistics(self, largest: float, mean: float, kl: float) -> bool:
        """Return whether the statistics of the differences are within the bounds."""
        return largest <= self.largest and mean <= self.mean and kl <= self.kl

    @property
    def slack(self) -> float:
        """Bound on the shift of a cumulative probability."""
        return self.largest if self.largest < math.inf else 2 * self.mean

    def __str__(self) -> str:
        if self.largest < math.inf:
            return f"{self.largest:g} nats are allowed"
        return f"{self.mean:g} nats on average and a KL divergence of {self.kl:g} are allowed"


ROUNDING = {
    ("float32", "cpu"): Rounding(1e-4),
    ("float32", "cuda"): Rounding(1e-2),
    ("bfloat16", "cpu"): Rounding(0.02),
    ("bfloat16", "cuda"): Rounding(math.inf, mean=0.05, kl=0.01, missed=0.1),
}
"""Bounds by the precision of matrix products and the device."""
