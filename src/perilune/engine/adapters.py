"""LoRA adapters for single requests: several policies on one base.

An adapter adds scale * B A x to the output of a projection (Hu et al., 2021). A step computes the base once
for all rows, and each adapter for its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from perilune.engine.step import StepBatch
from perilune.models.adapters.files import Adapter
from perilune.models.decoder import Decoder
from perilune.models.kernels import linear
from perilune.models.layers import Projection
from perilune.models.narrow import NarrowKind


class AdaptedProjections:
    """Adapters on the projections of one frozen decoder. They replace the adapters that were there before.

    `select` assigns adapters to the rows of the next forward pass.
    """

    def __init__(self, decoder: Decoder, adapters: Sequence[Adapter]) -> None:
        self._rows: list[tuple[int, Tensor]] = []
        names = {id(module): name for name, module in decoder.named_modules()}
        self._like = decoder.model.norm.weight
        for module in decoder.modules():
            for attribute, value in list(vars(module).items()):
                if isinstance(value, Projection):
                    base = value.base if isinstance(value, _Adapted) else value
                    parts = [names[id(part)] for part in base.parts]
                    additions = [_Additions(base, parts, adapter, self._like) for adapter in adapters]
                    setattr(module, attribute, _Adapted(base, additions, self._rows))

    def select(self, batch: StepBatch) -> None:
        """Use the adapters of the sequences in `batch`."""
        self._rows.clear()
        if batch.adapters is None:
            return
        of_token = np.repeat(batch.adapters, np.diff(batch.cu_seqlens))
        for number in np.unique(batch.adapters[batch.adapters >= 0]).tolist():
            rows = torch.from_numpy(np.flatnonzero(of_token == number))
            self._rows.append((number, rows.to(self._like.device)))


class _Additions:
    """The part of one adapter for one projection: A and B of each part that has them."""

    def __init__(self, projection: Projection, names: Sequence[str], adapter: Adapter, like: Tensor) -> None:
        self.parts: list[tuple[slice, Tensor, Tensor]] = []
        start = 0
        for part, name in zip(projection.parts, names, strict=True):
            stop = start + part.weight.shape[0]
            if name in adapter.pairs:
                a, b = adapter.pairs[name]
                self.parts.append((slice(start, stop), a.to(like), (b * adapter.scale).to(like)))
            start = stop

    def __call__(self, x: Tensor, out: Tensor, rows: Tensor) -> None:
        """Add the adapter's output for `rows` of `x` to `out`."""
        for columns, a, b in self.parts:
            added = linear(linear(x[rows], a), b)
            out[rows, columns] += added


class _Adapted(Projection):
    """A projection with adapters."""

    def __init__(
        self, base: Projection, additions: Sequence[_Additions], rows: list[tuple[int, Tensor]]
    ) -> None:
        super().__init__(*base.parts, exact=base.exact)
        self.base, self._additions, self._rows_of = base, additions, rows

    def __call__(self, x: Tensor) -> Tensor:
        out = self.base(x)
        for number, rows in self._rows_of:
            self._additions[number](x, out, rows)
        return out

    def freeze(self, source: Projection, kind: NarrowKind | None) -> None:
        """Freeze the base projection."""
        self.base.freeze(source, kind)
