"""Read any Hugging Face config.json as a `ModelCard`.

The keys in the file describe the model: `kv_lora_rank` means latent attention, a number of experts means a
mixture of experts, and `layer_types` has the kind of each layer. Missing keys have the defaults of the
model's family (`config.families`). An unknown family is read like Llama, which the card notes.
"""

from collections.abc import Mapping
from typing import Any

from perilune.errors import RequestError
from perilune.models.card.layers import Attention, FeedForward, LatentAttention, Layer, LinearAttention, Mixer
from perilune.models.card.model_card import ModelCard
from perilune.models.config.families import FAMILIES
from perilune.models.config.family import Bias, Family
from perilune.models.config.layer_kinds import is_sparse, layer_kinds, window_size
from perilune.models.config.reader import Reader

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def model_card(raw: Mapping[str, Any], *, where: str = "config.json") -> ModelCard:
    """Read the card of a model from its config.json; for a multimodal model, the card of its language model.

    Raises:
        RequestError: when a number is missing or out of range, naming file and key.
    """
    notes = []
    outer = Reader(raw, where).raw
    if isinstance(outer.get("text_config"), Mapping):
        notes.append("the language model alone: encoders for images or sound are not counted")
        tied = outer.get("tie_word_embeddings")
        raw = outer["text_config"] if tied is None else {"tie_word_embeddings": tied, **outer["text_config"]}
        where = f"{where}:text_config"
    kind = raw.get("model_type")
    if not isinstance(kind, str) or raw.get("is_encoder_decoder"):
        raise Reader(raw, where).wrong("model_type", "give the config.json of a decoder-only language model")
    if kind not in FAMILIES:
        notes.append(f"the family {kind} is unknown and read like Llama, so the numbers are estimates")
    if outer.get("quantization_config") is not None:
        notes.append("the checkpoint is quantized; bytes are those of the requested dtype")
    return _ModelReader(raw, where, FAMILIES.get(kind, Family())).card(kind, tuple(notes))


class _ModelReader:
    """Reads one config.json with the defaults of its family."""

    def __init__(self, raw: Mapping[str, Any], where: str, family: Family) -> None:
        values = {key: value for key, value in family.read(raw).items() if value is not None}
        self.read = Reader(values, where)
        self.family = family
        self.hidden = self.read.count("hidden_size")
        self.heads = self.read.count("num_attention_heads")
        self.head_size = self.read.count("head_dim", max(1, self.hidden // self.heads))

    def card(self, kind: str, notes: tuple[str, ...]) -> ModelCard:
        read, family, hidden = self.read, self.family, self.hidden
        kinds = layer_kinds(read, family, read.count("num_hidden_layers"))
        longest = read.count("max_position_embeddings", 2048)
        norm = hidden * family.norm_vectors
        layers = tuple(
            Layer(self.mixer(kind_of_layer), self.feed_forward(index), family.norms * norm)
            for index, kind_of_layer in enumerate(kinds)
        )
        return ModelCard(
            model_type=kind,
            hidden_size=hidden,
            vocab_size=read.count("vocab_size"),
            layers=layers,
            tied=read.boolean("tie_word_embeddings", False),
            other_parameters=norm + (longest * hidden if family.positions else 0),
            max_positions=longest,
            notes=notes,
        )

    def mixer(self, kind: str) -> Mixer:
        if kind == "linear_attention":
            return self.linear_attention()
        if "kv_lora_rank" in self.read.raw:
            return self.latent_attention()
        if kind == "full_attention":
            return self.attention(None)
        window = window_size(self.read, self.family)
        if kind == "sliding_attention" and window is not None:
            return self.attention(window)
        if kind == "chunked_attention":
            return self.attention(self.read.count("attention_chunk_size"))
        raise RequestError(
            f"layers of kind {kind!r} are not supported",
            where=f"{self.read.where}:layer_types",
            remedy="the kinds are full_attention, sliding_attention (with sliding_window), linear_attention",
        )

    def attention(self, window: int | None) -> Attention:
        family, hidden, heads, size = self.family, self.hidden, self.heads, self.head_size
        keys = self.read.count("num_key_value_heads", heads)
        if self.read.boolean("multi_query", False):
            keys = 1
        if window is not None and family.sinks == "windows":
            keys = self.read.count("swa_num_key_value_heads", 2 * keys)
        value_size = self.read.count("v_head_dim", size)
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
        hidden, heads, rank = self.hidden, self.heads, self.read.count("kv_lora_rank")
        plain, rotary = self.read.count("qk_nope_head_dim"), self.read.count("qk_rope_head_dim")
        value, query_rank = self.read.count("v_head_dim"), self.read.count("q_lora_rank", 0)
        bias = self.bias("attention_bias")
        queries = heads * (plain + rotary)
        parameters = hidden * queries
        if query_rank:
            parameters = query_rank * (hidden + queries + 1 + bias)
        parameters += (hidden + bias) * (rank + rotary) + rank * (1 + heads * (plain + value))
        parameters += (heads * value + bias) * hidden
        return LatentAttention(parameters, heads, rank, rotary, plain, value)

    def linear_attention(self) -> LinearAttention:
        hidden, kind = self.hidden, self.family.linear
        if kind == "lightning":
            width = self.heads * self.head_size
            parameters = 5 * hidden * width + width
            return LinearAttention(
                parameters, self.heads, "lightning attention", self.head_size, self.head_size
            )
        if kind == "kimi":
            read, names = self.read, ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
            if "linear_attn_config" in read.raw:
                read, names = (
                    read.inner("linear_attn_config"),
                    ("num_heads", "head_dim", "short_conv_kernel_size"),
                )
            heads, size, kernel = (
                read.count(name, default) for name, default in zip(names, (32, 128, 4), strict=True)
            )
            width = heads * size
            parameters = 4 * hidden * width + 3 * width * kernel + hidden * heads
            parameters += 2 * (hidden * size + size * width) + width + heads + size
            return LinearAttention(parameters, heads, "Kimi delta attention", size, size, 3 * width * kernel)
        if kind != "delta" and "linear_num_value_heads" not in self.read.raw:
            raise self.read.wrong("layer_types", "this kind of linear attention is not supported")
        read = self.read
        key_heads, heads = read.count("linear_num_key_heads"), read.count("linear_num_value_heads")
        key_size, value_size = read.count("linear_key_head_dim"), read.count("linear_value_head_dim")
        kernel = read.count("linear_conv_kernel_dim")
        values = heads * value_size
        channels = 2 * key_heads * key_size + values
        parameters = hidden * (channels + 2 * values + 2 * heads) + channels * kernel + 2 * heads + value_size
        return LinearAttention(
            parameters, heads, "gated delta net", key_size, value_size, channels * (kernel - 1)
        )

    def feed_forward(self, index: int) -> FeedForward:
        experts = next((self.read.count(key) for key in _EXPERTS if key in self.read.raw), 0)
        if not experts or not is_sparse(self.read, index):
            inner = self.read.count("intermediate_size", 4 * self.hidden if self.family.positions else None)
            return FeedForward(self.network(inner, self.bias(self.family.mlp_bias)), inner)
        inner = self.read.count("moe_intermediate_size", self.read.count("intermediate_size", 0) or None)
        bias = self.family.expert_bias
        shared_inner = self.read.count("shared_expert_intermediate_size", 0, least=0)
        shared_inner = shared_inner or self.read.count("n_shared_experts", 0, least=0) * inner
        shared = self.network(shared_inner, False) if shared_inner else 0
        shared += experts * (self.hidden + bias)
        if self.family.shared_gate and shared_inner:
            shared += self.hidden
        per_token = self.read.count("num_experts_per_tok")
        if per_token > experts:
            raise self.read.wrong("num_experts_per_tok", f"give at most {experts}, the number of experts")
        network = self.network(inner, bias)
        return FeedForward(network, inner, experts, per_token, shared_inner / inner, shared)

    def network(self, inner: int, bias: bool) -> int:
        """Return the number of parameters of one feed-forward network."""
        matrices = self.family.matrices
        return matrices * self.hidden * inner + ((matrices - 1) * inner + self.hidden if bias else 0)

    def bias(self, bias: Bias) -> bool:
        return bias if isinstance(bias, bool) else self.read.boolean(bias, False)
