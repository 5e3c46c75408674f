"""Any Hugging Face config.json as a `ModelCard`.

What a model has is told by the keys that are there: `kv_lora_rank` means latent attention, an expert count
means experts, `layer_types` says where windows and recurrences are. What keys do not tell, the model's family
does (`card_families`). A family that is not listed is read like Llama, and the card says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perilune.errors import RequestError
from perilune.models.card.layers import (
    Attention,
    FeedForward,
    LatentAttention,
    Layer,
    LinearAttention,
    Mixer,
)
from perilune.models.card.model_card import ModelCard
from perilune.models.card_families import CARD_FAMILIES, CardFamily
from perilune.models.config.reader import Reader

_LARGEST = 2**31
_MOST_LAYERS = 10_000
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def model_card(raw: Mapping[str, Any], *, where: str = "config.json") -> ModelCard:
    """The card of the model that a config.json describes; of the language model where it has several.

    Raises:
        RequestError: when a figure is missing or makes no sense, naming file and key.
    """
    notes = []
    outer = Reader(raw, where).raw
    if isinstance(outer.get("text_config"), Mapping):
        notes.append("the language model alone: encoders for images or sound are not counted")
        raw = {"tie_word_embeddings": outer.get("tie_word_embeddings"), **outer["text_config"]}
        where = f"{where}:text_config"
    kind = raw.get("model_type")
    if not isinstance(kind, str) or raw.get("is_encoder_decoder"):
        raise Reader(raw, where).wrong("model_type", "give the config.json of a decoder-only language model")
    if kind not in CARD_FAMILIES:
        notes.append(f"{kind} is not a family known here: read like Llama, so that figures are estimates")
    if outer.get("quantization_config") is not None:
        notes.append("the checkpoint is quantised; bytes are those of the dtype asked for")
    return _Config(raw, where, CARD_FAMILIES.get(kind, CardFamily())).card(kind, tuple(notes))


class _Config:
    """One config.json, read with the habits of its family."""

    def __init__(self, raw: Mapping[str, Any], where: str, family: CardFamily) -> None:
        names = {name: raw[theirs] for name, theirs in family.names.items() if raw.get(theirs) is not None}
        given = {key: value for key, value in raw.items() if value is not None}
        self.read = Reader({**family.defaults, **given, **names}, where)
        self.family = family
        self.hidden = self.figure("hidden_size")
        self.heads = self.figure("num_attention_heads")
        self.head_size = self.figure("head_dim", max(1, self.hidden // self.heads))

    def card(self, kind: str, notes: tuple[str, ...]) -> ModelCard:
        family, hidden, vocabulary = self.family, self.hidden, self.figure("vocab_size")
        count = self.figure("num_hidden_layers")
        if count > _MOST_LAYERS:
            raise self.read.wrong("num_hidden_layers", f"give at most {_MOST_LAYERS}")
        kinds = self.layer_kinds(count)
        longest = self.figure("max_position_embeddings", 2048)
        norm = hidden * family.norm_vectors
        layers = tuple(
            Layer(self.mixer(kinds[index]), self.feed_forward(index), family.norms * norm)
            for index in range(count)
        )
        tied = self.read.boolean("tie_word_embeddings", family.tied)
        other = norm + (longest * hidden if family.positions else 0)
        return ModelCard(kind, hidden, vocabulary, layers, tied, other, longest, notes)

    def layer_kinds(self, count: int) -> list[str]:
        """`layer_types`, or what the family means without them."""
        kinds = self.read.raw.get("layer_types")
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != count:
                raise self.read.wrong("layer_types", "give one kind for each layer")
            return kinds
        listed = self.read.raw.get("linear_attn_config")
        if isinstance(listed, Mapping):
            full = Reader(listed, f"{self.read.where}:linear_attn_config").integers("full_attn_layers")
            return ["full_attention" if i + 1 in full else "linear_attention" for i in range(count)]
        family = self.family
        every = self.figure("full_attention_interval", 0) or self.figure("sliding_window_pattern", 0)
        every = every or family.full_every
        other = "linear_attention" if family.linear else "sliding_attention"
        if family.linear and not every:
            raise self.read.wrong("layer_types", "say which layers have which attention")
        if family.linear or family.windows == "most":
            return [other if every and (i + 1) % every else "full_attention" for i in range(count)]
        if self.window is None or family.windows == "none":
            return ["full_attention"] * count
        lower = self.figure("max_window_layers", 28, least=0) if family.windows == "upper" else 0
        return [other if i >= lower else "full_attention" for i in range(count)]

    @property
    def window(self) -> int | None:
        if self.read.raw.get("use_sliding_window", self.family.windows != "upper") is False:
            return None
        return self.figure("sliding_window", 0, least=0) or None

    def mixer(self, kind: str) -> Mixer:
        if kind == "linear_attention":
            return self.linear_attention()
        if "kv_lora_rank" in self.read.raw:
            return self.latent_attention()
        if kind == "full_attention":
            return self.attention(None)
        if kind == "sliding_attention" and self.window is not None:
            return self.attention(self.window)
        if kind == "chunked_attention":
            return self.attention(self.figure("attention_chunk_size"))
        raise RequestError(
            f"a layer of kind {kind!r} is not understood",
            where=f"{self.read.where}:layer_types",
            remedy="the kinds are full_attention, sliding_attention (with sliding_window), linear_attention",
        )

    def attention(self, window: int | None) -> Attention:
        family, hidden, heads, size = self.family, self.hidden, self.heads, self.head_size
        keys = self.figure("num_key_value_heads", heads)
        if self.read.boolean("multi_query", False):
            keys = 1
        if window is not None and family.sinks == "windows":
            keys = self.figure("swa_num_key_value_heads", 2 * keys)
        value_size = self.figure("v_head_dim", size)
        queries = heads * size * (2 if family.output_gate else 1)
        inward, outward = queries + keys * (size + value_size), heads * value_size
        parameters = hidden * (inward + outward)
        parameters += inward * self.bias(family.qkv_bias) + hidden * self.bias(family.out_bias)
        if family.qk_norm == "full":
            parameters += (heads + keys) * size
        elif family.qk_norm == "head" or (family.qk_norm and self.bias(family.qk_norm)):
            parameters += 2 * size
        if family.sinks == "all" or (family.sinks and window is not None):
            parameters += heads
        return Attention(parameters, heads, keys, size, value_size, window)

    def latent_attention(self) -> LatentAttention:
        hidden, heads, rank = self.hidden, self.heads, self.figure("kv_lora_rank")
        nope, rotary = self.figure("qk_nope_head_dim"), self.figure("qk_rope_head_dim")
        value, query_rank = self.figure("v_head_dim"), self.figure("q_lora_rank", 0)
        bias = self.bias("attention_bias")
        queries = heads * (nope + rotary)
        parameters = hidden * queries
        if query_rank:
            parameters = query_rank * (hidden + queries + 1 + bias)
        parameters += (hidden + bias) * (rank + rotary) + rank * (1 + heads * (nope + value))
        parameters += (heads * value + bias) * hidden
        return LatentAttention(parameters, heads, rank, rotary, nope, value)

    def linear_attention(self) -> LinearAttention:
        hidden, kind = self.hidden, self.family.linear
        if kind == "lightning":
            width = self.heads * self.head_size
            parameters = 5 * hidden * width + width
            return LinearAttention(
                parameters, "lightning attention", self.heads, self.head_size, self.head_size
            )
        if kind == "kimi":
            inner = self.read.inner("linear_attn_config") if "linear_attn_config" in self.read.raw else None
            heads = inner.integer("num_heads", 32) if inner else self.figure("linear_num_heads", 32)
            size = inner.integer("head_dim", 128) if inner else self.figure("linear_head_dim", 128)
            kernel = (
                inner.integer("short_conv_kernel_size", 4)
                if inner
                else self.figure("linear_conv_kernel_dim", 4)
            )
            width = heads * size
            parameters = 4 * hidden * width + 3 * width * kernel + hidden * heads
            parameters += 2 * (hidden * size + size * width) + width + heads + size
            return LinearAttention(parameters, "Kimi delta attention", heads, size, size, 3 * width * kernel)
        if kind != "delta" and "linear_num_value_heads" not in self.read.raw:
            raise self.read.wrong("layer_types", "this kind of linear attention is not known here")
        key_heads, heads = self.figure("linear_num_key_heads"), self.figure("linear_num_value_heads")
        key_size, value_size = self.figure("linear_key_head_dim"), self.figure("linear_value_head_dim")
        kernel = self.figure("linear_conv_kernel_dim")
        values = heads * value_size
        channels = 2 * key_heads * key_size + values
        parameters = hidden * (channels + 2 * values + 2 * heads) + channels * kernel + 2 * heads + value_size
        return LinearAttention(parameters, "gated delta net", heads, key_size, value_size, channels * kernel)

    def feed_forward(self, index: int) -> FeedForward:
        experts = next((self.figure(key) for key in _EXPERTS if key in self.read.raw), 0)
        if not experts or not self.is_sparse(index):
            inner = self.figure("intermediate_size", 4 * self.hidden if self.family.positions else None)
            return FeedForward(self.network(inner, self.bias(self.family.mlp_bias)), inner)
        inner = self.figure("moe_intermediate_size", self.figure("intermediate_size", 0) or None)
        bias = self.family.expert_bias
        shared_inner = self.figure("shared_expert_intermediate_size", 0, least=0)
        shared_inner = shared_inner or self.figure("n_shared_experts", 0, least=0) * inner
        shared = self.network(shared_inner, False) if shared_inner else 0
        shared += experts * (self.hidden + bias)
        if self.family.shared_gate and shared_inner:
            shared += self.hidden
        passed = self.figure("num_experts_per_tok")
        if passed > experts:
            raise self.read.wrong("num_experts_per_tok", f"give at most {experts}, the number of experts")
        return FeedForward(
            self.network(inner, bias),
            inner,
            experts,
            passed,
            shared_inner / inner,
            shared,
        )

    def network(self, inner: int, bias: bool) -> int:
        """Parameters of one feed-forward network."""
        matrices = self.family.matrices
        return matrices * self.hidden * inner + ((matrices - 1) * inner + self.hidden if bias else 0)

    def is_sparse(self, index: int) -> bool:
        """Whether the layer has experts."""
        kinds = self.read.raw.get("mlp_layer_types")
        if isinstance(kinds, list) and index < len(kinds):
            return bool(kinds[index] == "sparse")
        if "first_k_dense_replace" in self.read.raw:
            every = self.figure("moe_layer_freq", 1)
            return index >= self.figure("first_k_dense_replace", 0, least=0) and index % every == 0
        if index in self.read.integers("mlp_only_layers"):
            return False
        return (index + 1) % self.figure("decoder_sparse_step", 1) == 0

    def bias(self, habit: bool | str) -> bool:
        return habit if isinstance(habit, bool) else self.read.boolean(habit, False)

    def figure(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of bearable size, or the default."""
        value = self.read.integer(key, default)
        if value != default and not least <= value <= _LARGEST:
            raise self.read.wrong(key, f"give an integer from {least} on")
        return value
