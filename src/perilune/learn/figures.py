"""Figures of a step: sums over the tokens of each micro-batch, made into those of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor


class Figures:
    """Sums over a micro-batch, kept on the device until they are told."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add_total(self, name: str, value: Tensor) -> None:
        self._values[name] = value.double()

    def add_mean(self, name: str, values: Tensor) -> None:
        self.add_total(name, values.sum(dtype=torch.float64))
        self._counts[name] = len(values)

    def add_max(self, name: str, values: Tensor) -> None:
        self.add_total(name, values.max())

    def told(self) -> dict[str, tuple[float, int]]:
        """By name the value, and over how many tokens it is a mean's sum; 0 for what is no mean."""
        values = torch.stack(list(self._values.values())).tolist()
        return {name: (v, self._counts.get(name, 0)) for name, v in zip(self._values, values, strict=True)}


def merged_figures(batches: Sequence[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    """Figures of a step from those of its micro-batches, added up in their order.

    Means are over the whole step's tokens, "..._max" is the largest.
    """
    totals: dict[str, float] = {"loss": 0.0}
    counts: dict[str, int] = {}
    for told in batches:
        for name, (value, count) in told.items():
            before = totals.get(name)
            if before is None:
                totals[name] = value
            else:
                totals[name] = float(np.maximum(before, value)) if name.endswith("_max") else before + value
            counts[name] = counts.get(name, 0) + count
    tokens = float(counts.get("entropy", 0))
    return {name: value / (counts.get(name) or 1) for name, value in totals.items()} | {"tokens": tokens}
