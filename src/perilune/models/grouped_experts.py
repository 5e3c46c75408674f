"""Computes all experts of a frozen mixture together.

A loop over experts must wait for the router's choice, on which its shapes depend. Here, shapes depend only on
the number of tokens, and no operation waits for the device. So a CUDA graph can capture the computation.

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
class ExpertGroups:
    """Pairs of a token and an expert, ordered by expert. Pair p belongs to token p // K.

    Attributes:
        order: int64[P], numbers of the pairs. The pairs of one expert are adjacent and ascending.
        ends: int32[E], the index in `order` at which the pairs of each expert end.
    """

    order: Tensor
    ends: Tensor


def group_by_expert(chosen: Tensor, experts: int) -> ExpertGroups:
    """Group the pairs of int64[N, K] `chosen` experts by expert."""
    by_expert, order = chosen.flatten().sort(stable=True)
    # `bincount` would wait for the device.
    numbers = torch.arange(experts, device=chosen.device)
    return ExpertGroups(order, torch.searchsorted(by_expert, numbers, right=True, out_int32=True))


GroupedProduct = Callable[[Tensor, StackedWeight, ExpertGroups], Tensor]
"""The product float[P, O] of each pair's row with the matrix of its expert. Rows are float[N, I], those of
tokens, or float[P, I], those of pairs. Precision is as in `products.linear`."""


class GroupedExperts:
    """The experts of a layer, computed by two grouped products.

    The frozen weights of the experts become views of one tensor for each product, so freezing the experts
    again overwrites that tensor.

    Args:
        first: the gate and up projections of each expert.
        last: the down projection of each expert.
        gated: the activation, a function of gate and up.
        product: computes the grouped products.
    """

    def __init__(
        self,
        first: Sequence[Sequence[Projection]],
        last: Sequence[Projection],
        gated: Callable[[Tensor, Tensor], Tensor],
        product: GroupedProduct,
    ) -> None:
        self._gate_up, self._down = stack_frozen_weights(first), stack_frozen_weights([[p] for p in last])
        self._round_input, self._gated, self._product = first[0][0].round_input, gated, product

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return float[N, d]: the sum of the K `chosen` experts of each token, with weights float[N, K]."""
        groups = group_by_expert(chosen, len(self._down.values))
        gate, up = self._product(self._round_input(x), self._gate_up, groups).chunk(2, dim=1)
        out = self._product(self._gated(gate, up), self._down, groups)
        return (out.view(*chosen.shape, -1) * weights[..., None]).sum(1)


def stack_frozen_weights(experts: Sequence[Sequence[Projection]]) -> StackedWeight:
    """Move the frozen weights of projections into one tensor, ordered by expert."""
    weights = [projection.frozen[0] for expert in experts for projection in expert if projection.frozen]
    narrow = [weight for weight in weights if isinstance(weight, NarrowWeight)]
    values = [weight.values for weight in narrow] or [w for w in weights if isinstance(w, Tensor)]
    scales = [weight.scales for weight in narrow if weight.scales is not None]
    return StackedWeight(_joined(values, len(experts)), _joined(scales, len(experts)) if scales else None)


def _joined(parts: list[Tensor], experts: int) -> Tensor:
    """Join the parts into one tensor [E, ...], of which they become views."""
    joined = torch.cat(parts)
    for part, view in zip(parts, torch.split_with_sizes(joined, [len(part) for part in parts]), strict=True):
        part.data = view
    return joined.view(experts, -1, *joined.shape[1:])
