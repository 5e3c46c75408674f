"""LoRA adapters of single requests: several policies on one base model.

An adapter adds scale * B A x to the output of a projection (Hu et al., 2021). A step computes the base once
for all rows, and each adapter only for the rows of the sequences that use it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from perilune.engine.step import StepBatch
from perilune.errors import RequestError
from perilune.models.adapters.files import Adapter
from perilune.models.decoder import Decoder
from perilune.models.layers import Projection
from perilune.models.narrow import NarrowKind
from perilune.models.products import linear


class NamedAdapters:
    """The adapters of an engine. Each adapter has a unique number, which is never reused."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._adapters: dict[int, Adapter] = {}
        self._pinned: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        """Return the number of loaded adapters: those with a name, and those in use by requests."""
        return len(self._adapters)

    def find_number(self, name: str | None, where: str) -> int:
        """Return the number of the adapter `name`; -1 if the name is None.

        Raises:
            RequestError: when there is no adapter of this name.
        """
        if name is None:
            return -1
        if name not in self._numbers:
            raise RequestError(f"no adapter {name!r}", where=where, remedy="add it with `add_adapter`")
        return self._numbers[name]

    def add(self, name: str, adapter: Adapter) -> None:
        """Add an adapter. If the name is in use, it refers to the new adapter from now on."""
        self._numbers[name] = self._next
        self._adapters[self._next] = adapter
        self._next += 1

    def remove(self, name: str) -> None:
        """Remove the name of an adapter, which must exist."""
        del self._numbers[name]

    @contextmanager
    def pin(self, number: int) -> Iterator[None]:
        """Keep an adapter loaded during the block."""
        self._pinned.append(number)
        try:
            yield
        finally:
            self._pinned.remove(number)

    def drop_unused(self, in_use: Iterable[int]) -> Mapping[int, Adapter]:
        """Drop adapters that have no name and are not `in_use`, and return the rest by number."""
        kept = {*self._numbers.values(), *self._pinned, *in_use} - {-1}
        self._adapters = {number: self._adapters[number] for number in sorted(kept)}
        return self._adapters


class AdaptedProjections:
    """Adapters on the projections of one frozen decoder, whose `Projection`s this class replaces.

    `select_rows` assigns adapters to the rows of the next forward pass.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._rows: list[tuple[int, Tensor]] = []
        self._numbers: set[int] = set()
        self._like = decoder.model.norm.weight
        # Each projection with the names of its linear maps.
        self._projections: list[tuple[list[str], _AdaptedProjection]] = []
        names = {id(module): name for name, module in decoder.named_modules()}
        for module in decoder.modules():
            for attribute, value in list(vars(module).items()):
                if isinstance(value, Projection):
                    adapted = _AdaptedProjection(value, self._rows)
                    setattr(module, attribute, adapted)
                    self._projections.append(([names[id(part)] for part in value.parts], adapted))

    def set_adapters(self, adapters: Mapping[int, Adapter]) -> None:
        """Use these adapters, by their numbers, from now on. A number always stands for the same adapter."""
        for names, projection in self._projections:
            for number in self._numbers - adapters.keys():
                del projection.adapters[number]
            for number in adapters.keys() - self._numbers:
                projection.adapters[number] = _ProjectionAdapter(
                    projection.base, names, adapters[number], self._like
                )
        self._numbers = set(adapters)

    def select_rows(self, batch: StepBatch) -> None:
        """Use the adapters of the sequences in `batch`."""
        self._rows.clear()
        if batch.adapters is None:
            return
        of_token = np.repeat(batch.adapters, np.diff(batch.cu_seqlens))
        for number in np.unique(batch.adapters[batch.adapters >= 0]).tolist():
            rows = torch.from_numpy(np.flatnonzero(of_token == number))
            self._rows.append((number, rows.to(self._like.device)))


class _ProjectionAdapter:
    """One adapter's matrices A and B for the parts of one projection."""

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
            added = linear(linear(x[rows].to(a.dtype), a), b)
            out[rows, columns] += added


class _AdaptedProjection(Projection):
    """A projection with adapters."""

    def __init__(self, base: Projection, rows: list[tuple[int, Tensor]]) -> None:
        super().__init__(*base.parts, exact=base.exact)
        self.base, self._rows_of = base, rows
        self.adapters: dict[int, _ProjectionAdapter] = {}

    def __call__(self, x: Tensor) -> Tensor:
        out = self.base(x)
        for number, rows in self._rows_of:
            self.adapters[number](x, out, rows)
        return out

    @property
    def is_rounded(self) -> bool:
        """True if products of the base round both factors."""
        return self.base.is_rounded

    def freeze(self, source: Projection, kind: NarrowKind | None) -> None:
        """Freeze the base projection."""
        self.base.freeze(source, kind)
