"""Record or replay the routes of a mixture of experts.

A route is the K experts that a layer's router chose for a token. `layer` is the index among the layers with
experts.

Sampler and learner round differently, or have weights of different versions. Their routers then choose
different experts for some tokens, which changes log-probs far more than rounding does. With routing
replay (R3, Ma et al., arXiv 2510.11370), the learner computes the experts that the sampler chose. Its own
router still determines their weights, so the router is trained.
"""

from typing import Protocol

from torch import Tensor


class Routing(Protocol):
    """An observer of the routes of a forward pass, which may also choose them."""

    def forced_experts(self, layer: int, rows: int) -> Tensor | None:
        """Return experts int64[rows, K] to use, -1 where the router chooses; None if it chooses for all."""

    def observe(self, layer: int, logits: Tensor, own: Tensor, chosen: Tensor) -> None:
        """Receive the router's logits float[rows, E], without gradient, and int64[rows, K] experts.

        Args:
            own: the router's own choice.
            chosen: the experts that compute the rows.
        """
