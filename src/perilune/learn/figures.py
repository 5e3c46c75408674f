"""Figures of micro-batches, and how they are merged into those of an update and of a step."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor


class Figures:
    """The figures of one micro-batch. They stay on the device until `read`."""

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

    def read(self) -> dict[str, tuple[float, int]]:
        """Return (value, count) by name. The count of a mean is its number of tokens, of others 0."""
        values = torch.stack(list(self._values.values())).tolist()
        return {name: (v, self._counts.get(name, 0)) for name, v in zip(self._values, values, strict=True)}


def merge_micro_batches(batches: Sequence[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    """Merge the figures of an update's micro-batches, in order.

    Means are over all tokens of the update; figures named "..._max" are maxima.
    """
    totals: dict[str, float] = {"loss": 0.0}
    counts: dict[str, int] = {}
    for figures in batches:
        for name, (value, count) in figures.items():
            before = totals.get(name)
            if before is None:
                totals[name] = value
            else:
                totals[name] = float(np.maximum(before, value)) if name.endswith("_max") else before + value
            counts[name] = counts.get(name, 0) + count
    tokens = float(counts.get("entropy", 0))
    return {name: value / (counts.get(name) or 1) for name, value in totals.items()} | {"tokens": tokens}


def merge_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the figures of a step's updates.

    `tokens` is a sum, figures named "..._max" are maxima, and others are means weighted by tokens.
    """
    if len(updates) == 1:
        return dict(updates[0])
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for figures in updates for name in figures):
        present = [figures for figures in updates if name in figures]
        if name == "tokens":
            merged[name] = math.fsum(figures[name] for figures in present)
        elif name.endswith("_max"):
            merged[name] = max(figures[name] for figures in present)
        else:
            weights = [figures["tokens"] for figures in present]
            total = math.fsum(weights)
            mean = math.fsum(figures[name] * w for figures, w in zip(present, weights, strict=True))
            merged[name] = mean / total if total else present[-1][name]
    return merged
