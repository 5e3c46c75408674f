"""All experts of a frozen mixture computed together: the same operations wherever the router sends tokens.

A loop over experts has to wait for the router's choice, and its shapes depend on it. Here shapes depend on
the number of tokens alone and nothing waits for the device, so a CUDA graph can capture it.

N tokens, K experts of each, E experts, P = N K pairs of a token and an expert, I inputs, O outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.models.layers import Projection
from perilune.models.narrow import NarrowWeight


@dataclass(frozen=True, slots=True, eq=False)
class StackedWeight:
    """One matrix of each expert.

    Attributes:
        values: [E, O, I] in the dtype of activations, or bfloat16 or int8.
        scales: float32[E, O] for int8, otherwise None.
    """

    values: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Pairs in the order of their experts. Pair p belongs to token p // K.

    Attributes:
        order: int64[P], numbers of the pairs; those of one expert are adjacent and ascending.
        ends: int32[E], where the pairs of each expert end in `order`.
    """

    order: Tensor
    ends: Tensor


def grouped(chosen: Tensor, experts: int) -> Groups:
    """The pairs of int64[N, K] `chosen` experts, grouped by expert."""
    by_expert, order = chosen.flatten().sort(stable=True)
    # `bincount` would wait for the device.
    numbers = torch.arange(experts, device=chosen.device)
    return Groups(order, torch.searchsorted(by_expert, numbers, right=True, out_int32=True))


GroupedProduct = Callable[[Tensor, StackedWeight, Groups], Tensor]
"""The product float[P, O] of each pair's row with the matrix of its expert. Rows are float[N, I], those of
tokens, or float[P, I], those of pairs. Precision is as in `products.linear`."""


class GroupedExperts:
    """The experts of a layer, computed by two grouped products.

    Moves the frozen weights of the experts into one tensor for each product. They become views of it, so
    freezing the experts again overwrites it.

    Args:
        first: the gate and up projections of each expert.
        last: the down projection of each expert.
        gated: combines gate and up.
    """

    def __init__(
        self,
        first: Sequence[Sequence[Projection]],
        last: Sequence[Projection],
        gated: Callable[[Tensor, Tensor], Tensor],
        product: GroupedProduct,
    ) -> None:
        self._gate_up, self._down = stack(first), stack([[one] for one in last])
        self._rounded, self._gated, self._product = first[0][0].rounded, gated, product

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """float[N, d] sums of the experts int64[N, K] of float[N, d] tokens, with weights float[N, K]."""
        groups = grouped(chosen, len(self._down.values))
        gate, up = self._product(self._rounded(x), self._gate_up, groups).chunk(2, dim=1)
        out = self._product(self._gated(gate, up), self._down, groups)
        return (out.view(*chosen.shape, -1) * weights[..., None]).sum(1)


def stack(experts: Sequence[Sequence[Projection]]) -> StackedWeight:
    """Move the frozen weights of projections into one tensor, in which those of an expert are adjacent."""
    weights = [projection.frozen[0] for own in experts for projection in own if projection.frozen]
    narrow = [weight for weight in weights if isinstance(weight, NarrowWeight)]
    values = [weight.values for weight in narrow] or [one for one in weights if isinstance(one, Tensor)]
    scales = [weight.scales for weight in narrow if weight.scales is not None]
    return StackedWeight(_joined(values, len(experts)), _joined(scales, len(experts)) if scales else None)


def _joined(parts: list[Tensor], experts: int) -> Tensor:
    """The parts as one tensor [E, ...]. They become views of it."""
    joined = torch.cat(parts)
    for part, view in zip(parts, torch.split_with_sizes(joined, [len(part) for part in parts]), strict=True):
        part.data = view
    return joined.view(experts, -1, *joined.shape[1:])
