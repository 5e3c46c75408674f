"""The time of an engine step as a function of its work.

    t = a + b prefill + c(rows) + d keys + e copied + f begun + g ended

* prefill: tokens of prompts and of preempted samples. Steps with prefill also have a constant time, a time
  for each chunk, and a time for each key that the queries of prefill read;
* rows: decoding samples. c is piecewise linear with knots up to 16 rows, because a product of 2 rows takes
  almost as long as a product of 16 rows;
* keys: keys that decoding samples read, averaged over the layers, because layers with a window read fewer.
  Keys that the preceding sample has just read, as in a group with one prompt, have a separate coefficient;
* copied: blocks that are copied when the samples of a group separate;
* begun, ended: samples that draw their first or last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from perilune.engine.blocks import BLOCK
from perilune.engine.step import StepBatch

KNOTS = (0, 1, 2, 4, 8, 16)  # numbers of rows between which c is linear; above the last, c has one slope
FEATURE_NAMES = (
    "step",
    *(f"rows to {end}" for end in KNOTS[1:]),
    "rows above",
    "key",
    "shared key",
    "prefill step",
    "chunk",
    "prefill token",
    "prefill key",
    "begin",
    "copy",
    "end",
)

MAX_SWEEPS, TOLERANCE = 20_000, 1e-10  # when the fit stops

Matrix = NDArray[np.float64]

Windows = Mapping[int | None, float]
"""Share of the layers with each window; None is full attention."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one engine step.

    Attributes:
        rows: number of decoding samples.
        keys: number of keys that they read, averaged over the layers.
        shared: number of these keys that the preceding decoding sample reads too.
        chunks: number of samples in prefill.
        prefill: number of tokens of prefill.
        prefill_keys: number of keys that the queries of prefill read, averaged over the layers.
        begun: number of samples that draw their first token, or their first token after a preemption.
        copied: number of copied blocks.
        ended: number of samples that draw their last token.
    """

    rows: int
    keys: float
    shared: float = 0.0
    chunks: int = 0
    prefill: int = 0
    prefill_keys: float = 0.0
    begun: int = 0
    copied: int = 0
    ended: int = 0

    @classmethod
    def from_batch(cls, batch: StepBatch, windows: Windows) -> StepWork:
        """Return the work of a batch, without the work after it: copies, and samples that begin or end."""
        lengths = batch.positions + 1
        read = lengths if windows.keys() == {None} else _mean_keys_read(lengths, windows)
        rows = batch.decodes
        chunks = len(batch.cu_seqlens) - 1 - rows
        keys, shared = float(read[:rows].sum()), _count_shared_keys(batch, read[:rows], windows)
        return cls(rows, keys, shared, chunks, len(lengths) - rows, float(read[rows:].sum()))

    def features(self) -> list[float]:
        """Return one value for each of `FEATURE_NAMES`."""
        ends = zip(KNOTS, (*KNOTS[1:], 1 << 40), strict=True)
        rows = [float(min(max(self.rows - low, 0), high - low)) for low, high in ends]
        prefill = [float(self.prefill > 0), float(self.chunks), float(self.prefill), self.prefill_keys]
        keys = [self.keys - self.shared, self.shared]
        return [1.0, *rows, *keys, *prefill, float(self.begun), float(self.copied), float(self.ended)]


def _mean_keys_read(seen: NDArray[np.int64], windows: Windows) -> NDArray[Any]:
    """Return the number of keys that each query reads, averaged over the layers."""
    read = np.zeros(len(seen))
    for size, share in windows.items():
        read += share * (seen if size is None else np.minimum(seen, size))
    return read


def _count_shared_keys(batch: StepBatch, read: NDArray[Any], windows: Windows) -> float:
    """Return the number of keys in leading blocks that decoding samples share with the preceding sample."""
    widest = 0 if None in windows else -1
    tables = batch.block_tables[widest, : batch.decodes]
    if batch.decodes < 2 or not (tables[1:, 0] == tables[:-1, 0]).any():
        return 0.0
    used = int(batch.positions[: batch.decodes].max()) // BLOCK + 1
    same = np.cumprod(tables[1:, :used] == tables[:-1, :used], axis=1).sum(axis=1)
    return float(np.minimum(same * BLOCK, read[1:]).sum())


class StepTimes(Protocol):
    """Predicts the time of a step."""

    def step_seconds(self, work: StepWork) -> float:
        """Return the seconds of the model and the scheduler for this work."""

    def bookkeeping_seconds(self, *, begun: int = 0, copied: int = 0, ended: int = 0) -> float:
        """Return the seconds of the work after the model's computation in the same step."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds per unit of each feature of a step, by its name in `FEATURE_NAMES`."""

    seconds: Mapping[str, float]

    def __post_init__(self) -> None:  # in the order of `StepWork.features`; JSON files are sorted
        object.__setattr__(self, "seconds", {name: self.seconds[name] for name in FEATURE_NAMES})

    def step_seconds(self, work: StepWork) -> float:
        return sum(map(float.__mul__, self.seconds.values(), work.features()))

    def bookkeeping_seconds(self, *, begun: int = 0, copied: int = 0, ended: int = 0) -> float:
        seconds = self.seconds
        return seconds["begin"] * begun + seconds["copy"] * copied + seconds["end"] * ended


def fit_step_cost(works: Sequence[StepWork], seconds: Sequence[float]) -> StepCost:
    """Fit non-negative costs to the measured `seconds` of each step.

    The fit minimizes the squares of relative errors, so that short and long steps have the same weight.
    """
    features = np.array([work.features() for work in works])
    return StepCost(dict(zip(FEATURE_NAMES, fit_relative(features, np.array(seconds)).tolist(), strict=True)))


def fit_relative(features: Matrix, measured: Matrix) -> Matrix:
    """Return the non-negative coefficients float64[F] that minimize the squares of the relative errors.

    The method is coordinate descent on the normal equations (Franc et al. 2005), which needs no library.

    Args:
        features: float64[N, F].
        measured: float64[N].
    """
    matrix = features / measured[:, None]
    scale = np.maximum(matrix.max(axis=0), 1e-300)
    matrix = matrix / scale
    gram, linear = matrix.T @ matrix, matrix.sum(axis=0)
    estimate = np.zeros(len(linear))
    for _ in range(MAX_SWEEPS):
        before = estimate.copy()
        for index in np.flatnonzero(gram.diagonal()):
            slope = gram[index] @ estimate - linear[index]
            estimate[index] = max(0.0, estimate[index] - slope / gram[index, index])
        if np.abs(estimate - before).max() < TOLERANCE * estimate.max():
            break
    solution: Matrix = estimate / scale
    return solution
