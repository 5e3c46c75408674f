"""The time of an engine step, from what it computes.

    t = a + b prefill + c(rows) + d keys + e copied

* prefill: tokens of prompts and of preempted samples, with a constant for a step that has any, a time for
  each chunk, and a time for the keys that their queries read;
* rows: decoding samples. c is piecewise linear with knots up to 16 rows, because a product of 2 rows takes
  almost as long as one of 16;
* keys: keys that decoding samples read, mean over the layers, because layers with a window read fewer. Those
  that the sample before has just read, as in a group with one prompt, have a time of their own;
* copied: blocks copied when samples of a group separate;
* begin, end: a time for each sample that the engine prepares or collects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from perilune.engine.blocks import BLOCK
from perilune.engine.step import StepBatch

KNOTS = (0, 1, 2, 4, 8, 16)  # rows between which the time is linear; above the last, one more slope
NAMES = (
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

SWEEPS, TOLERANCE = 20_000, 1e-10  # of the fit

Matrix = NDArray[np.float64]

Windows = Mapping[int | None, float]
"""Share of the layers with each window; None is full attention."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes.

    Attributes:
        rows: decoding samples.
        keys: keys that they read.
        shared: those of them that the decoding sample before reads too.
        chunks: samples in prefill.
        prefill: tokens of prefill.
        prefill_keys: keys that those read.
        begun: samples that draw their first token, or the first one after a preemption.
        copied: blocks.
        ended: samples that draw their last token.
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
    def of(cls, batch: StepBatch, windows: Windows) -> StepWork:
        """The work of a batch, without what follows it: copies, and samples that begin or end."""
        seen = batch.positions + 1
        read = seen if windows.keys() == {None} else _within(seen, windows)
        rows = batch.decodes
        chunks = len(batch.cu_seqlens) - 1 - rows
        keys, shared = float(read[:rows].sum()), _shared_keys(batch, read[:rows], windows)
        return cls(rows, keys, shared, chunks, len(seen) - rows, float(read[rows:].sum()))

    def features(self) -> list[float]:
        """One value for each of `NAMES`."""
        ends = zip(KNOTS, (*KNOTS[1:], 1 << 40), strict=True)
        rows = [float(min(max(self.rows - low, 0), high - low)) for low, high in ends]
        prefill = [float(self.prefill > 0), float(self.chunks), float(self.prefill), self.prefill_keys]
        keys = [self.keys - self.shared, self.shared]
        return [1.0, *rows, *keys, *prefill, float(self.begun), float(self.copied), float(self.ended)]


def _within(seen: NDArray[np.int64], windows: Windows) -> NDArray[Any]:
    """Keys that each query reads, mean over the layers."""
    read = np.zeros(len(seen))
    for size, share in windows.items():
        read += share * (seen if size is None else np.minimum(seen, size))
    return read


def _shared_keys(batch: StepBatch, read: NDArray[Any], windows: Windows) -> float:
    """Keys in leading blocks that a decoding sample and the one before have in common."""
    widest = 0 if None in windows else -1
    tables = batch.block_tables[widest, : batch.decodes]
    if batch.decodes < 2 or not (tables[1:, 0] == tables[:-1, 0]).any():
        return 0.0
    used = int(batch.positions[: batch.decodes].max()) // BLOCK + 1
    same = np.cumprod(tables[1:, :used] == tables[:-1, :used], axis=1).sum(axis=1)
    return float(np.minimum(same * BLOCK, read[1:]).sum())


class StepTimes(Protocol):
    """Predicts the time of a step."""

    def of_step(self, work: StepWork) -> float:
        """Seconds of the model and the scheduler."""

    def after_step(self, *, begun: int = 0, copied: int = 0, ended: int = 0) -> float:
        """Seconds of what follows the model's computation in the same step."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of each feature of a step, by its name in `NAMES`."""

    seconds: Mapping[str, float]

    def of_step(self, work: StepWork) -> float:
        return sum(map(float.__mul__, self.seconds.values(), work.features()))

    def after_step(self, *, begun: int = 0, copied: int = 0, ended: int = 0) -> float:
        seconds = self.seconds
        return seconds["begin"] * begun + seconds["copy"] * copied + seconds["end"] * ended


def fit(works: Sequence[StepWork], seconds: Sequence[float]) -> StepCost:
    """The non-negative cost with the least relative squares: short steps count as much as long ones."""
    features = np.array([work.features() for work in works])
    return StepCost(dict(zip(NAMES, relative_fit(features, np.array(seconds)).tolist(), strict=True)))


def relative_fit(features: Matrix, measured: Matrix) -> Matrix:
    """Non-negative coefficients float64[F] of float64[N, F] with the least relative squares.

    Coordinate descent on the normal equations (Franc et al. 2005), which needs no library for a dozen
    unknowns.
    """
    matrix = features / measured[:, None]
    scale = np.maximum(matrix.max(axis=0), 1e-300)
    matrix = matrix / scale
    gram, linear = matrix.T @ matrix, matrix.sum(axis=0)
    found = np.zeros(len(linear))
    for _ in range(SWEEPS):
        before = found.copy()
        for place in np.flatnonzero(gram.diagonal()):
            slope = gram[place] @ found - linear[place]
            found[place] = max(0.0, found[place] - slope / gram[place, place])
        if np.abs(found - before).max() < TOLERANCE * found.max():
            break
    solution: Matrix = found / scale
    return solution
