"""The feed-forward half of a layer: one gated network, or several of which a token takes a few."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.layer_kinds import Experts
from perilune.models.kernels import geglu, route, swiglu
from perilune.models.layers import Projection


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
    """Each token goes through the experts its router finds most probable, K of E, weighted by that.

    Top-k routing without a limit on an expert's tokens (Shazeer et al. 2017; Qwen3, 2025).
    """

    def __init__(self, config: DecoderConfig, experts: Experts) -> None:
        super().__init__()
        self.per_token, self.normalised = experts.per_token, experts.normalised
        self.gate = nn.Linear(config.hidden_size, experts.count, bias=False)
        self.experts = nn.ModuleList(MLP(config, experts.intermediate_size) for _ in range(experts.count))
        # A little rounding here would send tokens to other experts, and saves next to nothing.
        self.router = Projection(self.gate, exact=True)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x)
        # The pairs of token and expert, expert by expert; then back, so that a token's sum has one order.
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        parts = torch.split_with_sizes(x[order // self.per_token], counts)
        outs = [expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        out = torch.cat(outs)[back].view(*chosen.shape, -1) * weights[..., None]
        # One by one, as the native step adds them: `sum` has another order for many.
        return functools.reduce(torch.add, out.unbind(1))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of float[N, d], the weights float[N, K] and indices int64[N, K] of each token's experts."""
        weights, chosen = route(self.router(x), self.per_token, self.normalised)
        return weights.to(x.dtype), chosen
