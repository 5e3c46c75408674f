"""The codec decoder: frames of codes to samples, in chunks of any length.

The decoder is causal: codebook embeddings, a convolution, a transformer with a sliding window, then
upsampling convolutions. The `CodecState` of a stream keeps the past inputs that these modules still need, so
a chunk is decoded without older frames (`speech.streaming`).

B streams, T frames or samples, C channels, Q codebooks. Tensors are [B, T, C]; parameter names are those of
Qwen3-TTS-Tokenizer-12Hz. Sources: SoundStream (Zeghidour et al., arXiv 2107.03312), Mimi (Défossez et al.,
arXiv 2410.00037), ConvNeXt (Liu et al., arXiv 2201.03545), Snake (Ziyin et al., arXiv 2006.08195).
"""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perilune.models.kernels import full_rotary_tables, rotate
from perilune.models.layers import Projection, RMSNorm
from perilune.speech.config import CodecConfig
from perilune.speech.quantizer import Quantizer
from perilune.speech.spectral import SpectralVocoder
from perilune.speech.streaming import CausalConv, CausalUpsample, CodecState, DepthwiseConv, Streamed, project

_DILATIONS = (1, 3, 9)


class Snake(nn.Module):
    """x + sin(a x)^2 / b with learned log a and log b for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.zeros(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        return x + (x * self.alpha.exp()).sin().square() / (self.beta.exp() + 1e-9)


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution and a feed-forward network, scaled and added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = DepthwiseConv(channels, 7)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), 1e-6))
        self.up, self.down = Projection(self.pwconv1), Projection(self.pwconv2)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        inner = project(self.up, self.norm(self.dwconv(x, state)))
        return x + self.gamma * project(self.down, F.gelu(inner))


class ResidualUnit(nn.Module):
    """A dilated convolution and a convolution of width 1, added to their input."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1, self.act2 = Snake(channels), Snake(channels)
        self.conv1 = CausalConv(channels, channels, 7, dilation)
        self.conv2 = CausalConv(channels, channels, 1)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        inner: Tensor = self.act2(self.conv1(self.act1(x, state), state), state)
        return x + self.conv2(inner, state)  # type: ignore[no-any-return]


class VocoderBlock(nn.Module):
    """Upsamples by `rate`, halves the channels, and applies residual units."""

    def __init__(self, channels: int, rate: int) -> None:
        super().__init__()
        half = channels // 2
        units = [ResidualUnit(half, dilation) for dilation in _DILATIONS]
        self.block = nn.ModuleList([Snake(channels), CausalUpsample(channels, half, 2 * rate, rate), *units])

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        for part in self.block:
            x = part(x, state)
        return x


class _LayerScale(nn.Module):
    """A learned factor of each channel (Touvron et al., arXiv 2103.17239)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((channels,), 0.01))


class WindowAttention(Streamed):
    """Attention over the last W frames, the query's own included.

    Each query has W keys, ordered by distance, so sums have the same order for all chunk sizes.
    """

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.window, self.size = config.window, config.head_dim
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        queries, keys, bias = self.heads * self.size, self.kv_heads * self.size, config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)
        self.qkv, self.out = Projection(self.q_proj, self.k_proj, self.v_proj), Projection(self.o_proj)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, state: CodecState) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x.flatten(0, 1)).view(batch * length, -1, self.size)
        qk, v = qkv.split_with_sizes([self.heads + self.kv_heads, self.kv_heads], 1)
        q, k = rotate(qk, cos, sin).split_with_sizes([self.heads, self.kv_heads], 1)
        new = torch.cat([k, v], dim=1).view(batch, length, -1)
        windows = state.extend(self.key, new, self.window - 1).unfold(1, self.window, 1)
        # [B, T, KV, D, W]
        k, v = windows.view(batch, length, 2, self.kv_heads, self.size, self.window).unbind(2)
        q = q.reshape(batch, length, self.kv_heads, -1, self.size)
        first = state.frames[:, None] + torch.arange(length, device=x.device) - (self.window - 1)
        hidden = first[..., None] + torch.arange(self.window, device=x.device) < 0
        scores = (q * self.size**-0.5) @ k
        weights = scores.masked_fill(hidden[:, :, None, None], -torch.inf).softmax(-1)
        return self.out((weights @ v.transpose(3, 4)).reshape(batch * length, -1)).view(x.shape)


class _FeedForward(nn.Module):
    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.gate_up, self.down = Projection(self.gate_proj, self.up_proj), Projection(self.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(self.gate_up, x).chunk(2, dim=2)
        return project(self.down, F.silu(gate) * up)


class TransformerLayer(nn.Module):
    """Attention and feed-forward, each scaled and added to the residual stream."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = WindowAttention(config), _FeedForward(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=False)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=False)
        self.self_attn_layer_scale = _LayerScale(config.hidden_size)
        self.mlp_layer_scale = _LayerScale(config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, state: CodecState) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos, sin, state)
        x = x + self.self_attn_layer_scale.scale * attended
        fed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + self.mlp_layer_scale.scale * fed


class CodecTransformer(nn.Module):
    """A causal transformer over frames with a sliding window."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=False)
        self.input_proj = nn.Linear(config.latent_dim, config.hidden_size)
        self.output_proj = nn.Linear(config.hidden_size, config.latent_dim)
        self.into, self.out = Projection(self.input_proj), Projection(self.output_proj)
        self.size, self.theta = config.head_dim, config.rope_theta

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        length = x.shape[1]
        positions = (state.frames[:, None] + torch.arange(length, device=x.device)).flatten()
        exponents = torch.arange(0, self.size, 2, device=x.device).float() / self.size
        angles = (positions[:, None].float() / self.theta**exponents)[:, None]
        cos, sin = full_rotary_tables(angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        x = project(self.into, x)
        for layer in self.layers:
            x = layer(x, cos, sin, state)
        return project(self.out, self.norm(x))


class CodecDecoder(nn.Module):
    """Frames of codes to samples in [-1, 1], T frames to T * `config.frame` samples."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        latent = config.latent_dim
        self.quantizer = Quantizer(config)
        self.pre_conv = CausalConv(config.codebook_dim, latent, 3)
        self.pre_transformer = CodecTransformer(config)
        self.upsample = nn.ModuleList(
            nn.ModuleList([CausalUpsample(latent, latent, factor, factor), ConvNeXtBlock(latent)])
            for factor in config.upsampling_ratios
        )
        self.decoder = self._spectral() if config.vocoder == "spectrum" else self._convolutions()
        for name, module in self.named_modules():
            if isinstance(module, Streamed):
                module.key = name

    def _spectral(self) -> nn.ModuleList:
        latent = self.config.latent_dim
        ends = SpectralVocoder(latent, self.config.upsample_rates[0])
        return nn.ModuleList([ConvNeXtBlock(latent), ConvNeXtBlock(latent), ends])

    def _convolutions(self) -> nn.ModuleList:
        config = self.config
        dims = [config.vocoder_dim // 2**i for i in range(len(config.upsample_rates) + 1)]
        blocks = [VocoderBlock(dim, rate) for dim, rate in zip(dims, config.upsample_rates, strict=False)]
        ends = [Snake(dims[-1]), CausalConv(dims[-1], 1, 7)]
        return nn.ModuleList([CausalConv(config.latent_dim, config.vocoder_dim, 7), *blocks, *ends])

    def forward(self, codes: Tensor, state: CodecState | None = None) -> Tensor:
        """Return samples float[B, T * frame] of int64[B, T, Q] codes. `state` advances by T frames."""
        return self.synthesize(self.quantizer(codes), state)

    def synthesize(self, latents: Tensor, state: CodecState | None = None) -> Tensor:
        """Return samples float[B, T * frame] of dequantized codes float[B, T, codebook_dim]."""
        state = state or CodecState.start(len(latents), latents.device)
        x: Tensor = self.decoder[-1](self.features(latents, state), state)
        state.frames = state.frames + latents.shape[1]
        return x[..., 0].clamp(-1, 1)

    def features(self, latents: Tensor, state: CodecState) -> Tensor:
        """Return the input of the vocoder's last part, for losses on the spectra that it predicts."""
        x: Tensor = self.pre_transformer(self.pre_conv(latents, state), state)
        for part in (*(block for blocks in self.upsample for block in blocks), *self.decoder[:-1]):  # type: ignore[attr-defined]
            x = part(x, state)
        return x

    @property
    def device(self) -> torch.device:
        return self.pre_conv.conv.weight.device

    @torch.no_grad()
    def frozen(self) -> CodecDecoder:
        """Return a copy for inference with weights in the fastest layout."""
        copy = deepcopy(self).requires_grad_(False)
        for module in copy.modules():
            for part in vars(module).values():
                if isinstance(part, Projection):
                    part.freeze(part, None)
        for codebook in copy.quantizer.codebooks:
            codebook.frozen = codebook.table()
        return copy
