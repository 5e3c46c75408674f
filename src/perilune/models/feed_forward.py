"""The feed-forward part of a layer: one gated network, or a mixture of experts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.layer_kinds import Experts
from perilune.models.grouped_experts import GroupedExperts, GroupedProduct
from perilune.models.kernels import clamped_glu, geglu, route, route_by_sigmoid, sigmoid, swiglu
from perilune.models.layers import ExpertLinear, Projection, add_linear_maps, copy_in_place
from perilune.models.routing import Routing


class GatedNetwork(nn.Module):
    """Gated feed-forward: down(f(gate(x)) * up(x)), where f is SiLU, GELU or another function (Shazeer 2020).

    Args:
        gate, down: the first and the last map.
        up: the second map; None if `gate` computes gate(x) and up(x), concatenated.
    """

    def __init__(
        self, config: DecoderConfig, gate: Projection, up: Projection | None, down: Projection
    ) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down
        self.gated = _GATES[config.family.activation]

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate.round_input(x)
        if self.up is None:
            gate, up = self.gate(x).chunk(2, dim=1)
            return self.down(self.gated(gate, up))
        return self.down(self.gated(self.gate(x), self.up(x)))


_GATES = MappingProxyType({"silu": swiglu, "gelu_pytorch_tanh": geglu, "clamped": clamped_glu})


class MLP(GatedNetwork):
    """A gated network with parameters of its own.

    Args:
        inner: inner width of the network.
        bias: whether the maps have biases.
    """

    def __init__(self, config: DecoderConfig, inner: int, bias: bool = False) -> None:
        nn.Module.__init__(self)
        hidden, family = config.hidden_size, config.family
        sizes = {"gate_proj": inner, "up_proj": inner}
        fused = family.module_name("gate_proj") == family.module_name("up_proj")
        steps = [sizes] if fused else [{name: size} for name, size in sizes.items()]
        gate, *up = (add_linear_maps(self, family, hidden, outputs, bias) for outputs in steps)
        self.gate, self.up = gate, up[0] if up else None
        self.down = add_linear_maps(self, family, inner, {"down_proj": hidden}, bias)
        self.gated = _GATES[family.activation]


class FusedExperts(nn.ModuleList):
    """All experts of a layer in one tensor per map, as in gpt-oss. Outputs of gate and up alternate.

    E experts, I inner width.
    """

    def __init__(self, config: DecoderConfig, experts: Experts) -> None:
        super().__init__()
        count, hidden, inner = experts.count, config.hidden_size, experts.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, hidden, 2 * inner))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * inner))
        self.down_proj = nn.Parameter(torch.empty(count, inner, hidden))
        self.down_proj_bias = nn.Parameter(torch.empty(count, hidden))
        self._parts: dict[str, tuple[Tensor, ...]] = {}
        for expert in range(count):
            first, last = (
                partial(self._expert_parameters, name, expert) for name in ("gate_up_proj", "down_proj")
            )
            maps = (
                ExpertLinear(first, slice(0, None, 2)),
                ExpertLinear(first, slice(1, None, 2)),
                ExpertLinear(last, slice(None)),
            )
            self.append(GatedNetwork(config, *(Projection(part) for part in maps)))

    @contextmanager
    def split(self) -> Iterator[None]:
        """Split the tensors once for the whole context, so that the backward pass builds one gradient."""
        self._parts = {name: tensor.unbind() for name, tensor in self.named_parameters(recurse=False)}
        try:
            yield
        finally:
            self._parts = {}

    def _expert_parameters(self, name: str, expert: int) -> tuple[Tensor, Tensor]:
        weight, bias = (self._parts.get(key, self.get_parameter(key)) for key in (name, f"{name}_bias"))
        return weight[expert], bias[expert]


class MixtureOfExperts(nn.Module):
    """A feed-forward layer in which K of E experts compute each token, weighted by the router's scores.

    Top-k routing without a capacity limit (Shazeer et al. 2017; Qwen3, 2025). In some families a shared
    network computes every token too (DeepSeekMoE, arXiv 2401.06066).

    Args:
        index: index of the layer among the layers with experts.
    """

    def __init__(self, config: DecoderConfig, experts: Experts, index: int = 0) -> None:
        super().__init__()
        family = config.family
        self.index, self.mixture = index, experts
        # Rounding the router would change the choice of experts and save almost nothing.
        outputs, bias = {"gate": experts.count}, family.expert_bias
        self.router_map = add_linear_maps(self, family, config.hidden_size, outputs, bias, exact=True)
        self.has_correction, self._gate = family.correction, family.module_name("gate")
        if family.correction:
            correction = torch.zeros(experts.count, dtype=torch.float32)
            self.get_submodule(self._gate).register_buffer(CORRECTION, correction)
        self.experts = (
            FusedExperts(config, experts)
            if family.fused_experts
            else nn.ModuleList(MLP(config, experts.intermediate_size) for _ in range(experts.count))
        )
        self._grouped: GroupedExperts | None = None
        self._shared = family.module_name("shared_experts") if experts.shared_size else None
        self.shared_gate: Projection | None = None
        if self._shared is not None:
            self.add_module(self._shared, MLP(config, experts.shared_size))
            if family.shared_gate:
                gate = {f"{self._shared}_gate": 1}
                self.shared_gate = add_linear_maps(self, family, config.hidden_size, gate, exact=True)

    def forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        weights, chosen = self.route(x, routing)
        out = (self._run_each_expert if self._grouped is None else self._grouped)(x, weights, chosen)
        return out if self._shared is None else out + self._shared_output(x)

    def use_grouped_product(self, product: GroupedProduct) -> None:
        """Compute all experts together with `product` from now on. They are frozen `MLP`s without biases."""
        networks = [network for network in self.experts if isinstance(network, GatedNetwork)]
        first = [[network.gate] if network.up is None else [network.gate, network.up] for network in networks]
        last = [network.down for network in networks]
        self._grouped = GroupedExperts(first, last, networks[0].gated, product)

    def _run_each_expert(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        # Sort the (token, expert) pairs by expert, and sort the results back into the order of tokens.
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        parts = torch.split_with_sizes(x[order // self.mixture.per_token], counts)
        with self.experts.split() if isinstance(self.experts, FusedExperts) else nullcontext():
            outs = [expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        out = torch.cat(outs)[back].view(*chosen.shape, -1) * weights[..., None]
        # Add one by one, as the native step does; `sum` uses another order when there are many.
        return functools.reduce(torch.add, out.unbind(1))

    def route(self, x: Tensor, routing: Routing | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights float[N, K] and indices int64[N, K] of the experts of float[N, d] tokens."""
        logits = self.router_map(x)
        forced = None if routing is None else routing.forced_experts(self.index, len(x))
        weights, chosen = self._choose(logits, forced)
        if routing is not None:
            with torch.no_grad():
                own = chosen if forced is None else self._choose(logits, None)[1]
            routing.observe(self.index, logits.detach(), own, chosen)
        return weights.to(x.dtype), chosen

    def _choose(self, logits: Tensor, forced: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.has_correction:
            return route_by_sigmoid(logits, self.mixture, self.correction, forced)
        weights, chosen = route(logits, self.mixture.per_token, self.mixture.normalized, forced)
        return (weights if self.mixture.scale == 1 else weights * self.mixture.scale), chosen

    @property
    def correction(self) -> Tensor:
        """float32[E]: added to the scores for the choice of experts. Training does not change it."""
        return self.get_submodule(self._gate).get_buffer(CORRECTION)

    def freeze_correction(self, source: MixtureOfExperts) -> None:
        """Copy the current correction of `source`."""
        fresh = copy_in_place(self.correction, source.correction.clone())
        self.get_submodule(self._gate).register_buffer(CORRECTION, fresh)

    def _shared_output(self, x: Tensor) -> Tensor:
        out: Tensor = self.get_submodule(str(self._shared))(x)
        return out if self.shared_gate is None else sigmoid(self.shared_gate(x)) * out


CORRECTION = "e_score_correction_bias"
