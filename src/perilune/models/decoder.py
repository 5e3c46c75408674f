"""The decoder: one definition of the Qwen3 and Llama families, for rollouts and for learning alike.

Tokens are flat: sequences lie end to end on one axis of N tokens, without padding. Whoever calls decides
how tokens see each other by passing an `Attention`. Parameters are named as in Hugging Face checkpoints.

N tokens, d hidden size, H query heads, KV key-value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from perilune.models.attention import Attention
from perilune.models.config import DecoderConfig
from perilune.models.kernels import both_halves, linear, pack_weight, rms_norm, rotate, swiglu


class RMSNorm(nn.Module):
    """Scale to unit root mean square, then by a learned weight (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Projection:
    """Linear maps of the same input, computed as one product.

    The parameters stay with their modules, under their Hugging Face names, and are joined on every call;
    a frozen projection was joined once, in the order that is fastest to read.
    """

    def __init__(self, *parts: nn.Linear | nn.Embedding) -> None:
        self.parts = parts
        self.frozen: tuple[Tensor, Tensor | None] | None = None

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

    def freeze(self, source: Projection) -> None:
        """Take the present weights of `source`; no gradient reaches them."""
        weight, bias = source.joined()
        self.frozen = pack_weight(weight.detach()), None if bias is None else bias.detach().clone()


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions; Qwen3 normalises q and k per head first."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.size = config.num_heads, config.num_kv_heads, config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, self.heads * self.size, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.size, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.size, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.size, hidden, bias=bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(self.size, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.size, config.rms_norm_eps)
        self.qk_norm = config.qk_norm
        self.frozen_qk_norm: Tensor | None = None
        self.qkv = Projection(self.q_proj, self.k_proj, self.v_proj)
        self.out = Projection(self.o_proj)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, self.size)
        qk, v = torch.split_with_sizes(qkv, [self.heads + self.kv_heads, self.kv_heads], 1)
        if self.qk_norm:
            qk = rms_norm(qk, self.qk_norm_weight(), self.q_norm.eps)
        q, k = torch.split_with_sizes(rotate(qk, cos, sin), [self.heads, self.kv_heads], 1)
        return self.out(attention(self.layer, q, k, v).reshape(x.shape[0], -1))

    def qk_norm_weight(self) -> Tensor:
        """float[H + KV, D]: the norm weight of each head of q, then of k."""
        if self.frozen_qk_norm is not None:
            return self.frozen_qk_norm
        q, k = self.q_norm.weight, self.k_norm.weight
        return torch.cat([q.expand(self.heads, -1), k.expand(self.kv_heads, -1)])


class MLP(nn.Module):
    """Gated feed-forward: down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.mlp_bias)
        self.gate, self.up, self.down = (
            Projection(part) for part in (self.gate_proj, self.up_proj, self.down_proj)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate(x), self.up(x)))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on a normalised copy and added back."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attention)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Body(nn.Module):
    """Everything between token ids and the last hidden state; `model.` in Hugging Face names."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        # Without torch's own initialisation, which on the meta device imports its compiler: a second or two.
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=False)  # type: ignore[no-untyped-call]
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A causal language model over flat tokens."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.head = Projection(self.model.embed_tokens if config.tie_word_embeddings else self.lm_head)
        # Not a buffer: it stays float32 when the model is cast.
        self.inverse_frequencies = inverse_frequencies(config)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Last hidden state, float[N, d], of int64[N] tokens at int64[N] positions in their sequences."""
        cos, sin = both_halves(*self.rotary(positions))
        x = self.model.embed_tokens(token_ids)
        for block in self.model.layers:
            x = block(x, cos, sin, attention)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """float[N, V] scores of the next token, from float[N, d]."""
        return self.head(hidden)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float[N, 1, D / 2] each, of every pair's angle; float32 inside."""
        self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = (positions[:, None].float() * self.inverse_frequencies)[:, None]
        dtype = self.model.embed_tokens.weight.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)

    @torch.no_grad()
    def frozen(self) -> Decoder:
        """A copy of the present weights for inference, faster than the original and untouched by training."""
        with torch.device("meta"):
            copy = Decoder(self.config)
        for projection, its_projection in zip(self._projections(), copy._projections(), strict=True):
            its_projection.freeze(projection)
        embedding = nn.Parameter(self.model.embed_tokens.weight.detach().clone(), requires_grad=False)
        copy.model.embed_tokens.weight = embedding
        for mine, its in zip(self.modules(), copy.modules(), strict=True):
            if isinstance(mine, RMSNorm) and isinstance(its, RMSNorm):
                its.weight = nn.Parameter(mine.weight.detach().clone(), requires_grad=False)
            if isinstance(mine, SelfAttention) and isinstance(its, SelfAttention) and mine.qk_norm:
                its.frozen_qk_norm = mine.qk_norm_weight()
        return copy

    def _projections(self) -> list[Projection]:
        attributes = [value for module in self.modules() for value in vars(module).values()]
        return [value for value in attributes if isinstance(value, Projection)]

    def initialize(self, seed: int) -> None:
        """Draw fresh weights: normal with the config's deviation, biases zero, norms one."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.fill_(1.0)
                elif name.endswith(".bias"):
                    parameter.zero_()
                else:
                    deviation = self.config.initializer_range
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)


def inverse_frequencies(config: DecoderConfig) -> Tensor:
    """float32[D / 2] rotation speed of each pair, in radians a token; Llama 3.1 stretches the slow ones."""
    exponents = torch.arange(0, config.head_dim, 2, device="cpu").float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = ramp.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
