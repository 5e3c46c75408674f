"""Norms and linear maps of a decoder, which can be frozen for inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from perilune.models.config.family import Family
from perilune.models.kernels import rms_norm
from perilune.models.narrow import NarrowKind, NarrowWeight, Precision
from perilune.models.native.ops import PackedWeight
from perilune.models.products import linear, pack_weight


@runtime_checkable
class Freezable(Protocol):
    """A module with weights of its own, besides its projections, that a frozen copy takes over."""

    def freeze(self, source: Any) -> None:
        """Copy the current weights of `source`, a module of the same class, without gradients."""


class RMSNorm(nn.Module):
    """Scale to unit root mean square, then by a learned weight (Zhang & Sennrich 2019).

    Args:
        offset: the factor is 1 + weight.
    """

    def __init__(self, size: int, eps: float, offset: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if offset else torch.ones(size))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.factor(), self.eps)

    def factor(self) -> Tensor:
        """float[size], the factor of the normalised input."""
        return 1 + self.weight if self.offset else self.weight

    def freeze(self, source: RMSNorm) -> None:
        factor = copied_in_place(self.weight.detach(), source.factor().detach().clone())
        self.weight, self.offset = nn.Parameter(factor, requires_grad=False), False


class Projection:
    """Linear maps of one input, computed as one product.

    The parameters stay in their modules under their Hugging Face names and are joined on every call. A frozen
    projection is joined once, in the fastest layout.

    Args:
        parts: the maps.
        exact: never round these weights, whatever the kind of a frozen copy or the precision.

    Attributes:
        precision: precision of products that are not frozen.
    """

    def __init__(self, *parts: nn.Linear | nn.Embedding | ExpertMap, exact: bool = False) -> None:
        self.parts, self.exact = parts, exact
        self.precision: Precision = "float32"
        self.frozen: tuple[Tensor | PackedWeight | NarrowWeight, Tensor | None] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.joined() if self.frozen is None else self.frozen
        return linear(x, weight, bias, self.precision)

    @property
    def rounds(self) -> bool:
        """Whether products round both factors to bfloat16."""
        if self.frozen is None:
            return self.precision == "bfloat16"
        return isinstance(self.frozen[0], NarrowWeight) and self.frozen[0].scales is None

    def rounded(self, x: Tensor) -> Tensor:
        """`x` as the product needs it on a GPU, where all that depends on it is then bfloat16 too."""
        return x.to(torch.bfloat16) if self.rounds and x.device.type == "cuda" else x

    def joined(self) -> tuple[Tensor, Tensor | None]:
        """float[O, I] weight and float[O] bias of all parts, stacked."""
        weights = [self.weight_of(part) for part in self.parts]
        return weights[0] if len(weights) == 1 else torch.cat(weights), self.joined_bias()

    def weight_of(self, part: nn.Module) -> Tensor:
        """The float[O, I] weight of one part."""
        weight: Tensor = part.weight  # type: ignore[assignment]
        return weight

    def joined_bias(self) -> Tensor | None:
        """float[O] bias of all parts, if they have one."""
        biases = [bias for part in self.parts if (bias := bias_of(part)) is not None]
        if not biases:
            return None
        return biases[0] if len(biases) == 1 else torch.cat(biases)

    def freeze(self, source: Projection, kind: NarrowKind | None) -> None:
        weight, bias = source.joined()
        fresh = pack_weight(weight.detach(), bias, None if self.exact else kind)
        old = self.frozen or (None, None)
        self.frozen = copied_in_place(old[0], fresh[0]), copied_in_place(old[1], fresh[1])


class ExpertMap(nn.Module):
    """The linear map of one expert, as a view of tensors of all experts.

    Args:
        source: the expert's float[I, O'] matrix and float[O'] bias at the moment.
        columns: the map's outputs among the O'.
    """

    def __init__(self, source: Callable[[], tuple[Tensor, Tensor]], columns: slice) -> None:
        super().__init__()
        self._source, self._columns = source, columns

    @property
    def weight(self) -> Tensor:
        """float[O, I]."""
        return self._source()[0][:, self._columns].t()

    @property
    def bias(self) -> Tensor:
        """float[O]."""
        return self._source()[1][self._columns]


def bias_of(part: nn.Module) -> Tensor | None:
    """float[O], the bias of a part of a projection, if it has one."""
    return part.bias if isinstance(part, nn.Linear | ExpertMap) else None


def named_maps(
    owner: nn.Module,
    family: Family,
    inputs: int,
    outputs: Mapping[str, int],
    bias: bool = False,
    *,
    exact: bool = False,
) -> Projection:
    """Add linear maps of one input to `owner` under the family's names; maps with one name are stacked.

    Args:
        outputs: the number of outputs by general name.
        exact: see `Projection`.
    """
    rows: dict[str, int] = {}
    for name, count in outputs.items():
        own = family.module(name)
        rows[own] = rows.get(own, 0) + count
    maps = {name: nn.Linear(inputs, count, bias=bias) for name, count in rows.items()}
    for name, linear_map in maps.items():
        owner.add_module(name, linear_map)
    return Projection(*maps.values(), exact=exact)


CopiedT = TypeVar("CopiedT")


def copied_in_place(old: object, fresh: CopiedT) -> CopiedT:
    """`fresh`, copied over `old` when they are alike: captured CUDA graphs keep reading the old address."""
    if isinstance(old, NarrowWeight) and isinstance(fresh, NarrowWeight):
        values, scales = copied_in_place(old.values, fresh.values), copied_in_place(old.scales, fresh.scales)
        return NarrowWeight(values, scales)  # type: ignore[return-value]
    if isinstance(old, Tensor) and isinstance(fresh, Tensor) and _alike(old, fresh):
        return old.copy_(fresh)  # type: ignore[return-value]
    return fresh


def _alike(old: Tensor, fresh: Tensor) -> bool:
    """Whether one can be copied over the other. Opaque layouts (oneDNN) cannot."""
    layouts = [(one.shape, one.dtype, one.device, one.layout) for one in (old, fresh)]
    return layouts[0] == layouts[1] and old.layout == torch.strided
