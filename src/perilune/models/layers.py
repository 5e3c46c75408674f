"""What a decoder's layers are made of: norms, and linear maps that can be frozen."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from perilune.models.kernels import linear, pack_weight, rms_norm
from perilune.models.narrow import NarrowKind, NarrowWeight
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
        self.weight = nn.Parameter(source.factor().detach().clone(), requires_grad=False)
        self.offset = False


class Projection:
    """Linear maps of the same input, computed as one product.

    The parameters stay with their modules, under their Hugging Face names, and are joined on every call;
    a frozen projection was joined once, in the order that is fastest to read.

    Args:
        parts: the maps.
        exact: whether a frozen copy keeps them as they are, whatever it does with others.
    """

    def __init__(self, *parts: nn.Linear | nn.Embedding, exact: bool = False) -> None:
        self.parts, self.exact = parts, exact
        self.frozen: tuple[Tensor | PackedWeight | NarrowWeight, Tensor | None] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.joined() if self.frozen is None else self.frozen
        return linear(x, weight, bias)

    def joined(self) -> tuple[Tensor, Tensor | None]:
        """float[O, I] weight and float[O] bias of all parts, one below the other."""
        weights: list[Tensor] = [part.weight for part in self.parts]
        biases: list[Tensor] = [
            part.bias for part in self.parts if isinstance(part, nn.Linear) and part.bias is not None
        ]
        if len(weights) == 1:
            return weights[0], biases[0] if biases else None
        return torch.cat(weights), torch.cat(biases) if biases else None

    def freeze(self, source: Projection, kind: NarrowKind | None) -> None:
        """Take the present weights of `source`; no gradient reaches them."""
        weight, bias = source.joined()
        self.frozen = pack_weight(weight.detach(), bias, None if self.exact else kind)
