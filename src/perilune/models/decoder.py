"""The decoder: one definition of the Qwen3 and Llama families, for rollouts and for learning alike.

Tokens are flat: sequences lie end to end on one axis of N tokens, without padding. Whoever calls decides
how tokens see each other by passing an `Attention`. Parameters are named as in Hugging Face checkpoints.

N tokens, d hidden size, H query heads, KV key-value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perilune.models.attention import Attention
from perilune.models.config import DecoderConfig


class RMSNorm(nn.Module):
    """Scale to unit root mean square, then by a learned weight (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions; Qwen3 normalises q and k per head first."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.shape = (config.num_heads, config.num_kv_heads, config.head_dim)
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        heads, kv_heads, size = self.shape
        q = self.q_proj(x).view(-1, heads, size)
        k = self.k_proj(x).view(-1, kv_heads, size)
        v = self.v_proj(x).view(-1, kv_heads, size)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attention(self.layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o_proj(out.reshape(-1, heads * size))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Gated feed-forward: down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


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
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A causal language model over flat tokens."""

    inverse_frequencies: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("inverse_frequencies", inverse_frequencies(config), persistent=False)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Last hidden state, float[N, d], of int64[N] tokens at int64[N] positions in their sequences."""
        cos, sin = self.rotary(positions)
        x = self.model.embed_tokens(token_ids)
        for block in self.model.layers:
            x = block(x, cos, sin, attention)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """float[N, V] scores of the next token, from float[N, d]."""
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return F.linear(hidden, head.weight)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles, float[N, 1, D] each; float32 inside, given in the model's dtype."""
        angles = positions[:, None].float() * self.inverse_frequencies
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        dtype = self.model.embed_tokens.weight.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)

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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of float[N, H, D] (Su et al. 2021), halves paired as in Hugging Face."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def inverse_frequencies(config: DecoderConfig) -> Tensor:
    """float32[D / 2] rotation speed of each pair, in radians a token; Llama 3.1 stretches the slow ones."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = ramp.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
