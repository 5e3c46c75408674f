"""The feed-forward part of a layer: one gated network, or a mixture of experts."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.layer_kinds import Experts
from perilune.models.kernels import geglu, route, route_by_sigmoid, sigmoid, swiglu
from perilune.models.layers import Projection, copied_in_place, named_maps
from perilune.models.routing import Routing


class MLP(nn.Module):
    """Gated feed-forward: down(f(gate(x)) * up(x)) with f SiLU or GELU (Shazeer 2020).

    Args:
        inner: its inner width.
        bias: whether its maps have biases.
    """

    def __init__(self, config: DecoderConfig, inner: int, bias: bool = False) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.gate, self.up, self.down = (
            named_maps(self, config.family, inputs, {name: outputs}, bias)
            for name, inputs, outputs in (
                ("gate_proj", hidden, inner),
                ("up_proj", hidden, inner),
                ("down_proj", inner, hidden),
            )
        )
        self.gated = swiglu if config.family.activation == "silu" else geglu

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gated(self.gate(x), self.up(x)))


class MixtureOfExperts(nn.Module):
    """K of E experts compute each token, weighted by the router's scores.

    Top-k routing without a capacity limit (Shazeer et al. 2017; Qwen3, 2025). In some families a shared
    network computes every token too (DeepSeekMoE, arXiv 2401.06066).

    Args:
        index: number of the layer among those with experts.
    """

    def __init__(self, config: DecoderConfig, experts: Experts, index: int = 0) -> None:
        super().__init__()
        family = config.family
        self.index, self.mixture = index, experts
        # Rounding the router would change the choice of experts and save almost nothing.
        self.router = named_maps(self, family, config.hidden_size, {"gate": experts.count}, exact=True)
        self.corrects = family.correction
        if family.correction:
            correction = torch.zeros(experts.count, dtype=torch.float32)
            self.get_submodule(family.module("gate")).register_buffer(CORRECTION, correction)
        self.experts = nn.ModuleList(MLP(config, experts.intermediate_size) for _ in range(experts.count))
        self._shared = family.module("shared_experts") if experts.shared_size else None
        self.shared_gate: Projection | None = None
        if self._shared is not None:
            self.add_module(self._shared, MLP(config, experts.shared_size))
            if family.shared_gate:
                gate = {f"{self._shared}_gate": 1}
                self.shared_gate = named_maps(self, family, config.hidden_size, gate, exact=True)

    def forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        weights, chosen = self.route(x, routing)
        # Sort the (token, expert) pairs by expert, and back, so that each token's sum has a fixed order.
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        parts = torch.split_with_sizes(x[order // self.mixture.per_token], counts)
        outs = [expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        out = torch.cat(outs)[back].view(*chosen.shape, -1) * weights[..., None]
        # Add one by one, as the native step does; `sum` uses another order when there are many.
        out = functools.reduce(torch.add, out.unbind(1))
        return out if self._shared is None else out + self._shared_output(x)

    def route(self, x: Tensor, routing: Routing | None = None) -> tuple[Tensor, Tensor]:
        """Weights float[N, K] and indices int64[N, K] of the experts of float[N, d] tokens."""
        logits = self.router(x)
        given = None if routing is None else routing.given(self.index, len(x))
        weights, chosen = self._choose(logits, given)
        if routing is not None:
            routing.observe(self.index, logits.detach(), chosen)
        return weights.to(x.dtype), chosen

    def _choose(self, logits: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.corrects:
            return route_by_sigmoid(logits, self.mixture, self.correction, given)
        weights, chosen = route(logits, self.mixture.per_token, self.mixture.normalised, given)
        return (weights if self.mixture.scale == 1 else weights * self.mixture.scale), chosen

    @property
    def correction(self) -> Tensor:
        """float32[E], added to the experts' scores for the choice. Training does not change it."""
        (gate,) = self.router.parts
        return gate.get_buffer(CORRECTION)

    def freeze_correction(self, source: MixtureOfExperts) -> None:
        """Copy the current correction of `source`."""
        (gate,) = self.router.parts
        gate.register_buffer(CORRECTION, copied_in_place(self.correction, source.correction.clone()))

    def _shared_output(self, x: Tensor) -> Tensor:
        out: Tensor = self.get_submodule(str(self._shared))(x)
        return out if self.shared_gate is None else sigmoid(self.shared_gate(x)) * out


CORRECTION = "e_score_correction_bias"
