"""What a caller may do with the routes of a mixture of experts: record them, or have them replayed.

A route is the K experts that a layer's router chose for a token. Layers are counted among those with experts,
so a dense layer has no number.

Sampler and learner round differently, or have weights of different versions. Their routers then choose
different experts for some tokens, which changes log-probs far more than rounding does. Routing replay (R3, Ma
et al., arXiv 2510.11370) has the learner compute the experts that the sampler chose, weighted by its own
router, which is therefore still trained.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Routing(Protocol):
    """Sees every route of a forward pass, and may choose it."""

    def given(self, layer: int, rows: int) -> Tensor | None:
        """Experts int64[rows, K] to use, -1 where the router chooses; None if it chooses for all tokens."""

    def observe(self, layer: int, logits: Tensor, chosen: Tensor) -> None:
        """Called with the router's logits float[rows, E], without gradient, and experts int64[rows, K]."""
