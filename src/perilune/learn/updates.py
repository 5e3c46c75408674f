"""Several optimizer steps from one batch of episodes: how it is cut, and the figures of all together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from perilune.learn.weights import WeightedGroup


def minibatches(groups: Sequence[WeightedGroup], count: int) -> list[list[WeightedGroup]]:
    """At most `count` parts, never none, over which groups that teach something are dealt in turn.

    Each part has denominators of its own. From the second on the policy is no longer the one that sampled.
    """
    dealt = sorted(groups, key=lambda group: group.dead)
    return [part for start in range(count) if (part := dealt[start::count])] or [[]]


def merged(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Figures of all updates: tokens summed, "..._max" the largest, others means by tokens."""
    if len(figures) == 1:
        return dict(figures[0])
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for one in figures for name in one):
        having = [one for one in figures if name in one]
        if name == "tokens":
            found[name] = math.fsum(one[name] for one in having)
        elif name.endswith("_max"):
            found[name] = max(one[name] for one in having)
        else:
            weights = [one["tokens"] for one in having]
            total = math.fsum(weights)
            mean = math.fsum(one[name] * w for one, w in zip(having, weights, strict=True))
            found[name] = mean / total if total else having[-1][name]
    return found
