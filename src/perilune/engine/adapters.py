"""LoRA adapters, one a request: many characters on one base.

An adapter adds scale * B A x to what a projection makes of x (Hu et al., 2021). The rows of a step are
grouped by adapter, so that each is applied to its own rows only, and the base once to all.
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
    """Adapters laid over the projections of one frozen decoder, in place of those that lay there before.

    `select` says which rows of the next forward pass have which adapter.
    """

    def __init__(self, decoder: Decoder, adapters: Sequence[Adapter]) -> None:
        self._rows: list[tuple[int, Tensor]] = []
        names = {id(module): name for name, module in decoder.named_modules()}
        self._like = decoder.model.norm.weight
        for module in decoder.modules():
            for attribute, held in list(vars(module).items()):
                if isinstance(held, Projection):
                    base = held.base if isinstance(held, _Adapted) else held
                    parts = [names[id(part)] for part in base.parts]
                    additions = [_Additions(base, parts, adapter, self._like) for adapter in adapters]
                    setattr(module, attribute, _Adapted(base, additions, self._rows))

    def select(self, batch: StepBatch) -> None:
        """Take the adapters of a batch's sequences."""
        self._rows.clear()
        if batch.adapters is None:
            return
        of_token = np.repeat(batch.adapters, np.diff(batch.cu_seqlens))
        for number in np.unique(batch.adapters[batch.adapters >= 0]).tolist():
            rows = torch.from_numpy(np.flatnonzero(of_token == number))
            self._rows.append((number, rows.to(self._like.device)))


class _Additions:
    """What one adapter adds to one projection: A and B of each of its parts, or none."""

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
        """Add to the rows of `out` what their `x` gives."""
        for columns, a, b in self.parts:
            added = linear(linear(x[rows], a), b)
            out[rows, columns] += added


class _Adapted(Projection):
    """A projection with what the adapters add."""

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
        """Let the projection below take them."""
        self.base.freeze(source, kind)
