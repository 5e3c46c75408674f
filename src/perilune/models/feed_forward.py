"""The feed-forward part of a layer: one gated network, or a mixture of experts."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.layer_kinds import Experts
from perilune.models.kernels import geglu, route, swiglu
from perilune.models.layers import Projection
from perilune.models.routing import Routing


class MLP(nn.Module):
    """Gated feed-forward: down(f(gate(x)) * up(x)) with f SiLU or GELU (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, inner: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.gate_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.mlp_bias)
        self.gate, self.up, self.down = (
            Projection(part) for part in (self.gate_proj, self.up_proj, self.down_proj)
        )
        self.gated = swiglu if config.family.activation == "silu" else geglu

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gated(self.gate(x), self.up(x)))


class MixtureOfExperts(nn.Module):
    """K of E experts compute each token, weighted by the router's probabilities.

    Top-k routing without a capacity limit (Shazeer et al. 2017; Qwen3, 2025).

    Args:
        index: number of the layer among those with experts.
    """

    def __init__(self, config: DecoderConfig, experts: Experts, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.per_token, self.normalised = experts.per_token, experts.normalised
        self.gate = nn.Linear(config.hidden_size, experts.count, bias=False)
        self.experts = nn.ModuleList(MLP(config, experts.intermediate_size) for _ in range(experts.count))
        # Rounding the router would change the choice of experts and save almost nothing.
        self.router = Projection(self.gate, exact=True)

    def forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        weights, chosen = self.route(x, routing)
        # Sort the (token, expert) pairs by expert, and back, so that each token's sum has a fixed order.
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        parts = torch.split_with_sizes(x[order // self.per_token], counts)
        outs = [expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        out = torch.cat(outs)[back].view(*chosen.shape, -1) * weights[..., None]
        # Add one by one, as the native step does; `sum` uses another order when there are many.
        return functools.reduce(torch.add, out.unbind(1))

    def route(self, x: Tensor, routing: Routing | None = None) -> tuple[Tensor, Tensor]:
        """Weights float[N, K] and indices int64[N, K] of the experts of float[N, d] tokens."""
        logits = self.router(x)
        given = None if routing is None else routing.given(self.index, len(x))
        weights, chosen = route(logits, self.per_token, self.normalised, given)
        if routing is not None:
            routing.observe(self.index, logits.detach(), chosen)
        return weights.to(x.dtype), chosen
