"""The implicit objective of an algorithm: how it weights tasks by their pass rate.

With binary rewards and pass rate p, a group of K samples gives an expected gradient w(p) * grad p. A
success in a group with s successes has advantage A+(s), a failure A-(s); since
E[grad log pi | success] = grad p / p and E[grad log pi | failure] = -grad p / (1 - p),

    w(p) = sum over s of Binomial(K - 1, p)(s) * (A+(s + 1) - A-(s)).

The advantages come from the algorithm itself, so the curve includes the effects of group size and dead
groups. It assumes equal response lengths. For large K, w is 1 for Dr. GRPO (which maximizes p) and 1 / sqrt(p
(1 - p)) for GRPO (which maximizes 2 arcsin sqrt p).
"""

import math

import numpy as np

from perilune.data.episode import Episode, unsampled_tokens
from perilune.errors import RequestError
from perilune.learn.algorithms import Algorithm, StepContext, algorithm


def objective_curve(algo: str | Algorithm, group_size: int, points: int = 99) -> list[tuple[float, float]]:
    """Return (p, w(p)) of an algorithm at `points` evenly spaced pass rates in (0, 1).

    Raises:
        RequestError: when the algorithm is unknown or does not compare within groups, or `group_size` is 1.
    """
    chosen = algorithm(algo) if isinstance(algo, str) else algo
    if chosen.compares != "group":
        raise RequestError(
            f"{chosen.name} does not compare rewards within a group, so it has no implicit objective"
        )
    if group_size < 2:
        raise RequestError(
            f"a group of {group_size} has nothing to compare", remedy="use at least 2 samples per prompt"
        )
    advantages = [_advantages(chosen, s, group_size) for s in range(group_size + 1)]
    slopes = np.array([advantages[s + 1][0] - advantages[s][1] for s in range(group_size)])
    rest = group_size - 1
    counts = np.array([math.comb(rest, s) for s in range(group_size)], dtype=np.float64)
    successes = np.arange(group_size)
    curve = []
    for p in np.arange(1, points + 1) / (points + 1):
        chance = counts * p**successes * (1 - p) ** (rest - successes)
        curve.append((float(p), math.fsum(chance * slopes)))  # not BLAS, whose result depends on the kernel
    return curve


def live_group_probability(p: float, group_size: int) -> float:
    """Return the probability 1 - p^K - (1 - p)^K that K samples with pass rate p are not all equal."""
    return 1.0 - p**group_size - (1 - p) ** group_size


def _advantages(chosen: Algorithm, successes: int, group_size: int) -> tuple[float, float]:
    """Return the advantages of a success and of a failure in a group; NaN if it has none."""
    group = [_episode(index, float(index < successes)) for index in range(group_size)]
    zeros = {episode.episode_id: np.zeros(1, np.float32) for episode in group}
    context = StepContext(max_tokens=1, signals=dict.fromkeys(chosen.needs, zeros))
    (advantages,) = (weighted.advantages for weighted in chosen.weight_groups([group], context))
    assert advantages is not None
    success = float(advantages[0]) if successes else math.nan
    failure = float(advantages[-1]) if successes < group_size else math.nan
    return success, failure


def _episode(index: int, reward: float) -> Episode:
    return Episode(
        episode_id=f"0/0/{index}",
        group_id="0",
        task_id="binary",
        environment="binary",
        seed=0,
        messages=(),
        prompt_ids=np.zeros(1, np.int32),
        reward=reward,
        **unsampled_tokens([0]),
    )
