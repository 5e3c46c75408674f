"""A layer of linear attention: Gated DeltaNet (Yang et al., arXiv 2412.06464) as in Qwen3-Next."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from perilune.models.attention import Attention
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.layer_kinds import DeltaRule
from perilune.models.kernels import rms_norm, sigmoid, swiglu
from perilune.models.layers import RMSNorm, add_linear_maps, copy_in_place
from perilune.models.recurrence import DeltaInputs, HasRecurrence

_EPS = 1e-6  # added to the squared length of queries and keys


class GatedDeltaNet(nn.Module):
    """The gated delta rule (`models.recurrence`) after a short convolution, with a gated norm of its output.

    The decay of a head is exp(-exp(A_log) softplus(a + dt_bias)), and its strength is sigmoid(b), where a and
    b are projections of the token. Several value heads share a query and a key.
    """

    def __init__(self, config: DecoderConfig, delta: DeltaRule, layer: int) -> None:
        super().__init__()
        self.layer, self.sizes = layer, delta
        hidden, width = config.hidden_size, delta.heads * delta.value_size
        self._grouped = config.family.linear_grouped
        outputs = {"in_proj_qkv": delta.channels, "in_proj_z": width}
        outputs |= {"in_proj_b": delta.heads, "in_proj_a": delta.heads}
        self.input_projection = add_linear_maps(self, config.family, hidden, outputs)
        self.output_projection = add_linear_maps(self, config.family, width, {"out_proj": hidden})
        self.conv1d = nn.Module()
        self.conv1d.weight = nn.Parameter(torch.empty(delta.channels, 1, delta.taps))
        self.dt_bias, self.A_log = (nn.Parameter(torch.ones(delta.heads)) for _ in range(2))
        self.norm = RMSNorm(delta.value_size, config.rms_norm_eps, False)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        assert isinstance(attention, HasRecurrence), "this attention has no recurrent layers"
        sizes, recurrence = self.sizes, attention.recurrence
        projected = self.input_projection(x)
        if self._grouped:
            projected = projected.index_select(1, self._order.to(x.device))
        width = sizes.heads * sizes.value_size
        mixed, z, b, a = torch.split(projected, [sizes.channels, width, sizes.heads, sizes.heads], dim=1)
        weight: Tensor = self.conv1d.weight  # type: ignore[assignment]
        dtype = torch.promote_types(x.dtype, torch.float32)
        mixed = recurrence.convolve(self.layer, mixed, weight[:, 0])
        qk, v = torch.split(mixed, [sizes.channels - width, width], dim=1)
        q, k = self._normalized(qk.reshape(len(x), -1, sizes.key_size)).chunk(2, dim=1)
        out = recurrence.scan(
            self.layer,
            DeltaInputs(
                q,
                k,
                v.reshape(len(x), sizes.heads, -1),
                torch.exp(-self.A_log.to(dtype).exp() * _softplus(a.to(dtype) + self.dt_bias.to(dtype))),
                sigmoid(b.to(dtype)),
            ),
        )
        out = rms_norm(out, self.norm.factor().to(dtype), self.norm.eps).to(x.dtype)
        return self.output_projection(swiglu(z, out.flatten(1)))

    @cached_property
    def _order(self) -> Tensor:
        """int64[outputs]: the column of each output in the order q, k, v, z, b, a; stored by key head."""
        delta = self.sizes
        shared = delta.heads // delta.key_heads
        sizes = [delta.key_size, delta.key_size, *[shared * delta.value_size] * 2]
        wide = torch.arange(delta.key_heads * sum(sizes)).view(delta.key_heads, -1)
        narrow = wide.numel() + torch.arange(2 * delta.heads).view(delta.key_heads, -1)
        parts = [*torch.split(wide, sizes, dim=1), *torch.split(narrow, [shared, shared], dim=1)]
        return torch.cat([part.flatten() for part in parts])

    def _normalized(self, qk: Tensor) -> Tensor:
        """Scale queries and keys float[N, 2 Hk, Dk] to length 1, and divide queries by sqrt(Dk)."""
        size = self.sizes.key_size
        factors = qk.new_tensor([size**-1.0, size**-0.5]).repeat_interleave(self.sizes.key_heads)
        return rms_norm(qk, factors[:, None].expand(-1, size), _EPS / size)

    def freeze(self, source: GatedDeltaNet) -> None:
        """Copy the current weights of `source` except projections and norms, without gradient."""
        for name in ("conv1d.weight", "dt_bias", "A_log"):
            owner, _, attribute = name.rpartition(".")
            old, fresh = (module.get_parameter(name).detach() for module in (self, source))
            copied = nn.Parameter(copy_in_place(old, fresh.clone()), requires_grad=False)
            setattr(self.get_submodule(owner), attribute, copied)

    def initialize(self, generator: torch.Generator) -> None:
        """Draw A uniformly from 0.01 to 16, and set dt_bias to 1, as the authors do."""
        self.A_log.copy_(torch.rand(self.A_log.shape, generator=generator).mul(15.99).add(0.01).log())
        self.dt_bias.fill_(1.0)
        self.norm.weight.fill_(1.0)


def _softplus(x: Tensor) -> Tensor:
    """Compute log(1 + exp(x)). The result of an element does not depend on its position in the tensor."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
