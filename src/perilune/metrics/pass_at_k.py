"""pass@k from n samples per problem, c of them correct."""

import math

from perilune.errors import RequestError


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that at least one of k samples is correct: 1 - C(n - c, k) / C(n, k).

    The estimate is unbiased, unlike 1 - (1 - c / n)^k (Chen et al., arXiv 2107.03374).

    Raises:
        RequestError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= c <= n:
        raise RequestError(f"there cannot be {c} correct of {n} samples")
    if k < 1:
        raise RequestError(f"pass@{k} does not exist", remedy="k is 1 or more")
    if k > n:
        raise RequestError(
            f"pass@{k} cannot be computed from {n} samples per problem", remedy=f"use at least {k} samples"
        )
    return 1.0 - math.prod(1 - k / i for i in range(n - c + 1, n + 1))
