"""The decoder of all `DECODER_FAMILIES`, for sampling and for training.

Sequences are concatenated on one axis of N tokens, without padding. The caller passes an `Attention`, which
decides which tokens see each other. Parameter names are those of Hugging Face checkpoints.

N tokens, d hidden size, H query heads, KV key-value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from perilune.models.attention import Attention, AttentionLayer, ScoreOptions, soft_cap
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.rope import Rope
from perilune.models.delta import GatedDeltaNet
from perilune.models.feed_forward import MLP, MixtureOfExperts
from perilune.models.kernels import full_rotary_tables, rms_norm, rotate_part, sigmoid
from perilune.models.latent import LatentAttention
from perilune.models.layers import Freezable, Projection, RMSNorm, add_linear_maps, copy_in_place
from perilune.models.narrow import NarrowKind, Precision
from perilune.models.rotary import inverse_frequencies, rotary_scale
from perilune.models.routing import Routing


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions and, in some families, normalized queries and keys."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.window = layer, config.window(layer)
        self.heads, self.kv_heads, self.size = config.num_heads, config.num_kv_heads, config.head_dim
        queries, keys, hidden = self.heads * self.size, self.kv_heads * self.size, config.hidden_size
        self.gated = config.family.output_gate
        outputs = {"q_proj": queries * (2 if self.gated else 1), "k_proj": keys, "v_proj": keys}
        self.qkv = add_linear_maps(self, config.family, hidden, outputs, config.qkv_bias)
        self.out = add_linear_maps(self, config.family, queries, {"o_proj": hidden}, config.out_bias)
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            full, offset = self.qk_norm == "full", config.family.norm_offset
            self.q_norm = RMSNorm(queries if full else self.size, config.rms_norm_eps, offset)
            self.k_norm = RMSNorm(keys if full else self.size, config.rms_norm_eps, offset)
        # Attention divides scores by sqrt(D). Another divisor is a factor of the queries.
        self.query_scale = config.query_scale
        self.score_softcap, sinks = config.score_softcap, config.family.sinks
        has_sinks = sinks == "all" or (sinks == "windows" and self.window is not None)
        self.sinks = nn.Parameter(torch.empty(self.heads)) if has_sinks else None
        self.frozen_qk_norm: Tensor | None = None

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, attention: Attention) -> Tensor:
        qkv, gate = self.qkv(self.qkv.round_input(x)), None
        if self.gated:
            qkv, gate = self._split_gate(qkv)
        if self.qk_norm == "full":
            keys = self.kv_heads * self.size
            q, k, v = torch.split_with_sizes(qkv, [qkv.shape[1] - 2 * keys, keys, keys], 1)
            qkv = torch.cat([self.q_norm(q), self.k_norm(k), v], dim=1)
        qkv = qkv.view(x.shape[0], -1, self.size)
        qk, v = torch.split_with_sizes(qkv, [self.heads + self.kv_heads, self.kv_heads], 1)
        if self.qk_norm == "head":
            qk = rms_norm(qk, self.qk_norm_weight(), self.q_norm.eps)
        if cos is not None and sin is not None:
            qk = rotate_part(qk, cos, sin)
        q, k = torch.split_with_sizes(qk, [self.heads, self.kv_heads], 1)
        if self.query_scale != 1 and self.qk_norm != "head":
            q = q * self.query_scale
        attended = attention(q, k, v, AttentionLayer(self.layer, self.window, self.score_options))
        out = attended.reshape(x.shape[0], -1)
        return self.out(out if gate is None else out * sigmoid(gate))

    @property
    def score_options(self) -> ScoreOptions | None:
        """The changes to scores besides the softmax; None if there are none."""
        if self.sinks is None and self.score_softcap is None:
            return None
        return ScoreOptions(self.sinks, self.score_softcap)

    def _split_gate(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Split `qkv` into queries, keys and values, and the gate that follows the query of each head."""
        queries = self.heads * self.size
        q, rest = torch.split_with_sizes(qkv, [2 * queries, qkv.shape[1] - 2 * queries], 1)
        q, gate = q.reshape(len(q), self.heads, 2, self.size).unbind(2)
        return torch.cat([q.flatten(1), rest], dim=1), gate.flatten(1)

    def qk_norm_weight(self) -> Tensor:
        """Return float[H + KV, D], the norm weight of each head of q, then of k."""
        if self.frozen_qk_norm is not None:
            return self.frozen_qk_norm
        q, k = self.q_norm.factor(), self.k_norm.factor()
        q = q if self.query_scale == 1 else q * self.query_scale
        return torch.cat([q.expand(self.heads, -1), k.expand(self.kv_heads, -1)])

    def freeze(self, source: SelfAttention) -> None:
        if self.qk_norm == "head":
            self.frozen_qk_norm = copy_in_place(self.frozen_qk_norm, source.qk_norm_weight())
        if self.sinks is not None and source.sinks is not None:
            sinks = copy_in_place(self.sinks.detach(), source.sinks.detach().clone())
            self.sinks = nn.Parameter(sinks, requires_grad=False)


class Block(nn.Module):
    """One layer: attention, then feed-forward, each added to the residual stream x.

    `NORM_NAMES` lists the norms of inputs and outputs.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn: SelfAttention | LatentAttention
        self.linear_attn: GatedDeltaNet | None = None
        if config.delta is not None and config.is_linear(layer):
            self.linear_attn = GatedDeltaNet(config, config.delta, layer)
        elif config.latent is not None:
            self.self_attn = LatentAttention(config, config.latent, layer)
        else:
            self.self_attn = SelfAttention(config, layer)
        self._feed_forward = config.family.module_name("mlp")
        if config.experts is not None and config.is_sparse(layer):
            index = sum(config.is_sparse(before) for before in range(layer))
            self.add_module(self._feed_forward, MixtureOfExperts(config, config.experts, index))
        else:
            self.add_module(self._feed_forward, MLP(config, config.intermediate_size, config.mlp_bias))
        self._residual = config.multipliers.residual if config.multipliers else 1.0
        self._norms = NORM_NAMES[config.family.pre_norm, config.family.post_norm]
        for name in filter(None, self._norms):
            norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.family.norm_offset)
            self.add_module(name, norm)

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        attention: Attention,
        routing: Routing | None = None,
    ) -> Tensor:
        before_attention, after_attention, before_mlp, after_mlp = self._norms
        mixed = self._normalized(before_attention, x)
        if self.linear_attn is not None:
            attended = self.linear_attn(mixed, attention)
        else:
            attended = self.self_attn(mixed, cos, sin, attention)
        x = x + self._scaled(self._normalized(after_attention, attended))
        fed = self._normalized(before_mlp, x)
        network = self.feed_forward
        out = network(fed) if isinstance(network, MLP) else network(fed, routing)
        return x + self._scaled(self._normalized(after_mlp, out))

    @property
    def feed_forward(self) -> MLP | MixtureOfExperts:
        """The feed-forward part; `mlp` in most families."""
        return self.get_submodule(self._feed_forward)  # type: ignore[return-value]

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self._residual == 1 else x * self._residual

    def _normalized(self, norm: str | None, x: Tensor) -> Tensor:
        return x if norm is None else self.get_submodule(norm)(x)


NORM_NAMES = MappingProxyType(
    {
        # (pre_norm, post_norm): before attention, after it, before feed-forward, after it.
        (True, False): ("input_layernorm", None, "post_attention_layernorm", None),
        (False, True): (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        (True, True): (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
    }
)
"""Names of the norms of a layer in transformers. `post_attention_layernorm` has two meanings."""


class Body(nn.Module):
    """The layers from token ids to the last hidden state; `model.` in Hugging Face names."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        # torch's own initialization imports its compiler on the meta device, which takes a second or two.
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=False)  # type: ignore[no-untyped-call]
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.family.norm_offset)


class Decoder(nn.Module):
    """A causal language model over flat tokens.

    Attributes:
        recompute: whether training keeps only the input of each layer and recomputes the rest for the
            gradient (activation checkpointing; Chen et al., arXiv 1604.06174).
        precision: precision of products with matrices, set by `set_precision`.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute = False
        self.precision: Precision = "float32"
        self.model = Body(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.head = Projection(self.model.embed_tokens if config.tie_word_embeddings else self.lm_head)
        # Not buffers, so that they stay float32 when the model is cast.
        layer_ropes = {config.layer_rope(layer) for layer in range(config.num_layers)}
        ropes = {config.rope, *filter(None, layer_ropes)}
        self.inverse_frequencies = {
            rope: inverse_frequencies(rope, rope.width(config.rotary_size)) for rope in ropes
        }

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        routing: Routing | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Return the last hidden state float[N, d] of int64[N] tokens at int64[N] positions.

        `inputs` float[N, d] replace the embeddings of the tokens.
        """
        rotations = {
            rope: full_rotary_tables(*self.rotary(positions, rope)) for rope in self.inverse_frequencies
        }
        x = self.embed(token_ids) if inputs is None else inputs
        recompute = self.recompute and torch.is_grad_enabled()
        for layer, block in enumerate(self.model.layers):
            rope = self.config.layer_rope(layer)
            arguments = x, *(rotations[rope] if rope else (None, None)), attention, routing
            if recompute:
                x = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(*arguments)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the input float[N, d] of the first layer for int64[N] tokens."""
        x = self.model.embed_tokens(token_ids)
        if self.precision == "bfloat16":
            x = x.to(torch.bfloat16)  # like the table in a copy for sampling
        x = x.to(self.dtype)
        if self.config.embedding_scale == 1:
            return x  # type: ignore[no-any-return]
        # The factor is rounded to the dtype, as in the training of these models.
        return x * x.new_full((), self.config.embedding_scale)  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and norms. A frozen copy may store its matrices in another dtype."""
        weight: Tensor = self.model.norm.weight
        return weight.dtype

    def set_precision(self, precision: Precision) -> None:
        """Round both factors of matrix products to `precision`, except in routers. Sums are float32.

        Weights, logits and losses stay float32. On a CPU all activations do too. On a GPU only the residual
        stream does, and activations within a layer are rounded. Gradients of products are rounded too, except
        in the CPU's tiles (`ops.has_tiles`).
        """
        self.precision = precision
        for projection in self.projections():
            projection.precision = "float32" if projection.exact else precision

    def bfloat16_weights(self) -> dict[str, torch.dtype]:
        """Return the dtypes by name of the weights that bfloat16 products round: matrices and embeddings."""
        parts = [part.weight for maps in self.projections() if not maps.exact for part in maps.parts]
        rounded = {id(weight) for weight in (*parts, self.model.embed_tokens.weight)}
        return {name: torch.bfloat16 for name, weight in self.named_parameters() if id(weight) in rounded}

    @contextmanager
    def in_memory(self, *parts: nn.Module) -> Iterator[None]:
        """Keep the weights of `parts` in memory during the context; a plain `Decoder` always does."""
        yield

    def to_hf(self) -> dict[str, Any]:
        return self.config.to_hf()

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits float[N, V] of the next token from hidden states float[N, d]."""
        return scale_logits(self.head(hidden), self.config)

    def rotary(self, positions: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines float[N, 1, R / 2] of the angle of each pair, computed in float32.

        `rope` is the rotary embedding of a layer; the default is that of layers without a window.
        """
        rope = rope or self.config.rope
        frequencies = self.inverse_frequencies[rope] = self.inverse_frequencies[rope].to(positions.device)
        angles = (positions[:, None].float() * frequencies)[:, None]
        scale = rotary_scale(rope)
        return (angles.cos() * scale).to(self.dtype), (angles.sin() * scale).to(self.dtype)

    @torch.no_grad()
    def frozen_copy(self, kind: NarrowKind | None = None) -> Decoder:
        """Return a copy of the current weights for inference, faster and unaffected by training.

        Args:
            kind: how matrices are stored: "bfloat16", or "int8" with embeddings in bfloat16. By default
                products have this decoder's precision. Norms, biases, routers and activations keep their
                dtype.
        """
        with torch.device("meta"):
            copy = Decoder(self.config)
        copy.refreeze(self, kind)
        return copy

    @torch.no_grad()
    def refreeze(self, source: Decoder, kind: NarrowKind | None = None) -> None:
        """Copy the current weights of `source` into this frozen copy, which was made with the same `kind`.

        Plain tensors are overwritten in place, because captured CUDA graphs keep their addresses. On a GPU
        all tensors are plain.
        """
        if kind is None and source.precision == "bfloat16":
            kind = "bfloat16"
        with source.in_memory():
            self._freeze(source, kind)

    def _freeze(self, source: Decoder, kind: NarrowKind | None) -> None:
        for projection, own_projection in zip(source.projections(), self.projections(), strict=True):
            own_projection.freeze(projection, kind)
        table = source.model.embed_tokens.weight.detach()
        table = table.clone() if kind is None else table.to(torch.bfloat16, copy=True)
        table = copy_in_place(self.model.embed_tokens.weight.detach(), table)
        self.model.embed_tokens.weight = nn.Parameter(table, requires_grad=False)
        for name, module in self.named_modules():
            if isinstance(module, Freezable):
                module.freeze(source.get_submodule(name))
            elif isinstance(module, MixtureOfExperts) and module.has_correction:
                module.freeze_correction(source.get_submodule(name))  # type: ignore[arg-type]

    def projections(self) -> list[Projection]:
        """Return all projections. Each joins the linear maps of one input."""
        attributes = [value for module in self.modules() for value in vars(module).values()]
        return [value for value in attributes if isinstance(value, Projection)]

    def initialize(self, seed: int) -> None:
        """Draw new weights: normal with standard deviation `initializer_range`, biases 0, norms neutral."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.fill_(0.0 if self.config.family.norm_offset else 1.0)
                elif name.endswith(".bias"):
                    parameter.zero_()
                else:
                    deviation = self.config.initializer_range
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
            for module in self.modules():
                if isinstance(module, GatedDeltaNet):
                    module.initialize(generator)


def scale_logits(logits: Tensor, config: DecoderConfig) -> Tensor:
    """Divide and soft-cap the outputs of the head, in models that do so."""
    if config.multipliers is not None:
        logits = logits / config.multipliers.logits
    return logits if config.logit_softcap is None else soft_cap(logits, config.logit_softcap)
