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
    """A module with weights besides its projections, which a frozen copy also needs."""

    def freeze(self, source: Any) -> None:
        """Copy the current weights of `source`, a module of the same class, without gradients."""


class RMSNorm(nn.Module):
    """Root mean square normalization with a learned weight (Zhang & Sennrich 2019).

    Args:
        offset: whether the factor is 1 + weight instead of weight.
    """

    def __init__(self, size: int, eps: float, offset: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if offset else torch.ones(size))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.factor(), self.eps)

    def factor(self) -> Tensor:
        """Return the factor float[size] of the normalized input."""
        return 1 + self.weight if self.offset else self.weight

    def freeze(self, source: RMSNorm) -> None:
        factor = copy_in_place(self.weight.detach(), source.factor().detach().clone())
        self.weight, self.offset = nn.Parameter(factor, requires_grad=False), False


class Projection:
    """Linear maps of one input, computed as one product.

    The parameters stay in their modules under their Hugging Face names and are concatenated on every call. A
    frozen projection is concatenated once, in the fastest layout.

    Args:
        parts: the maps.
        exact: whether to keep these weights unrounded, even in a frozen copy or with a lower precision.

    Attributes:
        precision: precision of the product until the projection is frozen.
        frozen: weight and bias in the fastest layout; None until `freeze`.
    """

    def __init__(self, *parts: nn.Linear | nn.Embedding | ExpertLinear, exact: bool = False) -> None:
        self.parts, self.exact = parts, exact
        self.precision: Precision = "float32"
        self.frozen: tuple[Tensor | PackedWeight | NarrowWeight, Tensor | None] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.stack_parts() if self.frozen is None else self.frozen
        return linear(x, weight, bias, self.precision)

    @property
    def is_rounded(self) -> bool:
        """True if products round both factors to bfloat16."""
        if self.frozen is None:
            return self.precision == "bfloat16"
        return isinstance(self.frozen[0], NarrowWeight) and self.frozen[0].scales is None

    def round_input(self, x: Tensor) -> Tensor:
        """Round `x` to bfloat16 on a GPU if products are rounded, which makes later activations bfloat16."""
        return x.to(torch.bfloat16) if self.is_rounded and x.device.type == "cuda" else x

    def stack_parts(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight float[O, I] and the bias float[O] of all parts, stacked."""
        weights = [self.get_weight(part) for part in self.parts]
        return weights[0] if len(weights) == 1 else torch.cat(weights), self.stack_biases()

    def get_weight(self, part: nn.Module) -> Tensor:
        """Return the weight float[O, I] of one part."""
        weight: Tensor = part.weight  # type: ignore[assignment]
        return weight

    def stack_biases(self) -> Tensor | None:
        """Return the bias float[O] of all parts, or None without biases."""
        biases = [bias for part in self.parts if (bias := get_bias(part)) is not None]
        if not biases:
            return None
        return biases[0] if len(biases) == 1 else torch.cat(biases)

    def freeze(self, source: Projection, kind: NarrowKind | None) -> None:
        weight, bias = source.stack_parts()
        fresh = pack_weight(weight.detach(), bias, None if self.exact else kind)
        old = self.frozen or (None, None)
        self.frozen = copy_in_place(old[0], fresh[0]), copy_in_place(old[1], fresh[1])


class ExpertLinear(nn.Module):
    """The linear map of one expert, as a view of the tensors of all experts.

    Args:
        source: returns the expert's current matrix float[I, O'] and bias float[O'].
        columns: which of the O' outputs belong to this map.
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


def get_bias(part: nn.Module) -> Tensor | None:
    """Return the bias float[O] of a part of a projection, or None."""
    return part.bias if isinstance(part, nn.Linear | ExpertLinear) else None


def add_linear_maps(
    owner: nn.Module,
    family: Family,
    inputs: int,
    outputs: Mapping[str, int],
    bias: bool = False,
    *,
    exact: bool = False,
) -> Projection:
    """Add linear maps of one input to `owner` under the family's names; maps with the same name are stacked.

    Args:
        inputs: number of inputs.
        outputs: number of outputs of each map, by its general name.
        exact: see `Projection`.
    """
    rows: dict[str, int] = {}
    for name, count in outputs.items():
        module = family.module_name(name)
        rows[module] = rows.get(module, 0) + count
    maps = {name: nn.Linear(inputs, count, bias=bias) for name, count in rows.items()}
    for name, linear_map in maps.items():
        owner.add_module(name, linear_map)
    return Projection(*maps.values(), exact=exact)


CopiedT = TypeVar("CopiedT")


def copy_in_place(old: object, fresh: CopiedT) -> CopiedT:
    """Copy `fresh` over `old` if their layouts match, because captured CUDA graphs keep the old address.

    Returns `fresh` itself otherwise.
    """
    if isinstance(old, NarrowWeight) and isinstance(fresh, NarrowWeight):
        values, scales = copy_in_place(old.values, fresh.values), copy_in_place(old.scales, fresh.scales)
        return NarrowWeight(values, scales)  # type: ignore[return-value]
    if isinstance(old, Tensor) and isinstance(fresh, Tensor) and _can_copy(old, fresh):
        return old.copy_(fresh)  # type: ignore[return-value]
    return fresh


def _can_copy(old: Tensor, fresh: Tensor) -> bool:
    """Return whether `fresh` can be copied over `old`. Opaque layouts of oneDNN cannot."""
    layouts = [(x.shape, x.dtype, x.device, x.layout) for x in (old, fresh)]
    return layouts[0] == layouts[1] and old.layout == torch.strided
