"""What a decoder's layers are made of: norms, and linear maps that can be frozen."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from perilune.models.kernels import linear, pack_weight, rms_norm
from perilune.models.narrow import NarrowKind, NarrowWeight, Precision
from perilune.models.native.ops import PackedWeight


class RMSNorm(nn.Module):
    """Scale to unit root mean square, then by a learned weight (Zhang & Sennrich 2019).

    Args:
        offset: whether the factor is 1 + weight.
    """

    def __init__(self, size: int, eps: float, offset: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if offset else torch.ones(size))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.factor(), self.eps)

    def factor(self) -> Tensor:
        """float[size] that the normalised input is multiplied by."""
        return 1 + self.weight if self.offset else self.weight

    def freeze(self, source: RMSNorm) -> None:
        """Take the present factor of `source`; no gradient reaches it."""
        factor = copied_in_place(self.weight.detach(), source.factor().detach().clone())
        self.weight, self.offset = nn.Parameter(factor, requires_grad=False), False


class Projection:
    """Linear maps of the same input, computed as one product.

    The parameters stay with their modules, under their Hugging Face names, and are joined on every call;
    a frozen projection was joined once, in the order that is fastest to read.

    Args:
        parts: the maps.
        exact: whether they stay as they are, whatever a frozen copy or a precision does with others.

    Attributes:
        precision: of products that are not frozen.
    """

    def __init__(self, *parts: nn.Linear | nn.Embedding, exact: bool = False) -> None:
        self.parts, self.exact = parts, exact
        self.precision: Precision = "float32"
        self.frozen: tuple[Tensor | PackedWeight | NarrowWeight, Tensor | None] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.joined() if self.frozen is None else self.frozen
        return linear(x, weight, bias, self.precision)

    def joined(self) -> tuple[Tensor, Tensor | None]:
        """float[O, I] weight and float[O] bias of all parts, one below the other."""
        return self.joined_weight(), self.joined_bias()

    def joined_weight(self) -> Tensor:
        """The weight alone."""
        weights = [self.weight_of(part) for part in self.parts]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def weight_of(self, part: nn.Module) -> Tensor:
        """float[O, I] of one part."""
        weight: Tensor = part.weight  # type: ignore[assignment]
        return weight

    def joined_bias(self) -> Tensor | None:
        """The bias alone, if there is one."""
        biases: list[Tensor] = [
            part.bias for part in self.parts if isinstance(part, nn.Linear) and part.bias is not None
        ]
        if not biases:
            return None
        return biases[0] if len(biases) == 1 else torch.cat(biases)

    def freeze(self, source: Projection, kind: NarrowKind | None) -> None:
        """Take the present weights of `source`; no gradient reaches them."""
        weight, bias = source.joined()
        fresh = pack_weight(weight.detach(), bias, None if self.exact else kind)
        held = self.frozen or (None, None)
        self.frozen = copied_in_place(held[0], fresh[0]), copied_in_place(held[1], fresh[1])


CopiedT = TypeVar("CopiedT")


def copied_in_place(held: object, fresh: CopiedT) -> CopiedT:
    """`fresh`, in the memory of what is `held` where both are alike: captured graphs read it there."""
    if isinstance(held, NarrowWeight) and isinstance(fresh, NarrowWeight):
        return NarrowWeight(
            copied_in_place(held.values, fresh.values), copied_in_place(held.scales, fresh.scales)
        )  # type: ignore[return-value]
    if isinstance(held, Tensor) and isinstance(fresh, Tensor) and _alike(held, fresh):
        return held.copy_(fresh)  # type: ignore[return-value]
    return fresh


def _alike(held: Tensor, fresh: Tensor) -> bool:
    """Whether one can be copied over the other; not where a library hides how they lie."""
    places = [(one.shape, one.dtype, one.device, one.layout) for one in (held, fresh)]
    return places[0] == places[1] and held.layout == torch.strided
