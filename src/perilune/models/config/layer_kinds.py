"""Kinds of layers besides plain attention: windows, latent and linear attention, experts."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from perilune.models.config.family import Family
from perilune.models.config.reader import Reader

MAX_LAYERS = 10_000


def find_non_positive(owner: object, names: Collection[str], prefix: str = "") -> str | None:
    """Describe the first of the attributes `names` that is not a positive integer; None if all are."""
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            return f"{prefix}{name} is {value!r}, not a positive integer"
    return None


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the feed-forward network.

    Attributes:
        count, per_token: number of experts, and of those that compute one token.
        intermediate_size: inner width of one expert.
        normalized: whether the weights of a token's experts are scaled to sum to one.
        dense_layers: layers that have a plain feed-forward network instead.
        shared_size: inner width of the shared expert, which computes every token; 0 for none.
        groups: number of groups of equally many experts. The experts of a token come from the
            `groups_per_token` groups with the largest sum of their two best scores (DeepSeek-V3, arXiv
            2412.19437, section 2.1.2).
        scale: factor of the weights of a token's experts.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool = True
    dense_layers: tuple[int, ...] = ()
    shared_size: int = 0
    groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0

    def find_flaw(self) -> str | None:
        """Describe why such a mixture is impossible; None if it is possible."""
        sizes = ("count", "per_token", "intermediate_size", "groups", "groups_per_token")
        if flaw := find_non_positive(self, sizes, "experts."):
            return flaw
        if self.shared_size < 0:
            return f"experts.shared_size is {self.shared_size}, not 0 or more"
        if self.count % self.groups:
            return f"{self.count} experts cannot be divided into {self.groups} equal groups"
        if self.groups_per_token > self.groups:
            return f"a token uses {self.groups_per_token} of {self.groups} groups of experts"
        eligible = self.count // self.groups * self.groups_per_token
        if self.per_token > eligible:
            return f"a token uses {self.per_token} of {eligible} experts"
        return None

    def to_hf(self) -> dict[str, Any]:
        return {
            "num_experts": self.count,
            "num_experts_per_tok": self.per_token,
            "moe_intermediate_size": self.intermediate_size,
            "norm_topk_prob": self.normalized,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(self.dense_layers),
            "first_k_dense_replace": len(self.dense_layers),
            "shared_expert_intermediate_size": self.shared_size,
            "n_shared_experts": self.shared_size // self.intermediate_size,
            "n_group": self.groups,
            "topk_group": self.groups_per_token,
            "routed_scaling_factor": self.scale,
            "num_nextn_predict_layers": 0,
        }


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention (`models.latent`).

    Attributes:
        rank: size of the vector per token from which keys and values are projected.
        rotary_size: size of the rotary part of a query, and of the rotary key that all heads share.
        key_size, value_size: sizes of one head, without the rotary part.
        query_rank: size of the latent vector from which queries are projected; None if they are projected
            from the input.
        interleaved: whether a rotation pairs neighboring elements; otherwise it pairs the two halves of a
            head.
    """

    rank: int
    rotary_size: int
    key_size: int
    value_size: int
    query_rank: int | None = None
    interleaved: bool = True

    def find_flaw(self) -> str | None:
        """Describe why such attention is impossible; None if it is possible."""
        sizes = [*_LATENT_KEYS, *["query_rank"] * (self.query_rank is not None)]
        return find_non_positive(self, sizes, "latent.")

    def to_hf(self) -> dict[str, Any]:
        sizes = {key: getattr(self, name) for name, key in _LATENT_KEYS.items()}
        return {**sizes, "q_lora_rank": self.query_rank, "rope_interleave": self.interleaved}


_LATENT_KEYS = {
    "rank": "kv_lora_rank",
    "rotary_size": "qk_rope_head_dim",
    "key_size": "qk_nope_head_dim",
    "value_size": "v_head_dim",
}


def read_latent(read: Reader, options: Collection[str]) -> Latent:
    return Latent(
        **{name: read.count(key) for name, key in _LATENT_KEYS.items()},
        query_rank=None if read.raw.get("q_lora_rank") is None else read.count("q_lora_rank"),
        interleaved="rope_interleave" not in options or read.boolean("rope_interleave", True),
    )


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Linear attention by the gated delta rule in some layers (`models.delta`).

    Attributes:
        layers: the layers with linear attention.
        key_heads: number of query and key heads, each shared by `heads` / `key_heads` value heads.
        heads: number of value heads, each with a state [key_size, value_size].
        taps: width of the short convolution before the rule, in tokens including the current one.
    """

    layers: tuple[int, ...]
    key_heads: int
    heads: int
    key_size: int
    value_size: int
    taps: int = 4

    @property
    def channels(self) -> int:
        """Number of convolved elements of a token: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_size + self.heads * self.value_size

    def find_flaw(self) -> str | None:
        """Describe why such layers are impossible; None if they are possible."""
        if flaw := find_non_positive(self, _DELTA_KEYS, "delta."):
            return flaw
        if self.heads % self.key_heads:
            return f"{self.heads} value heads cannot share {self.key_heads} key heads evenly"
        return None

    def to_hf(self, layers: int) -> dict[str, Any]:
        linear = [layer in self.layers for layer in range(layers)]
        kinds = ["linear_attention" if is_linear else "full_attention" for is_linear in linear]
        return {"layer_types": kinds, **{key: getattr(self, name) for name, key in _DELTA_KEYS.items()}}


_DELTA_KEYS = {
    "key_heads": "linear_num_key_heads",
    "heads": "linear_num_value_heads",
    "key_size": "linear_key_head_dim",
    "value_size": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}


def read_delta(read: Reader, family: Family, layers: int) -> DeltaRule:
    """Read the layers of linear attention and their sizes.

    Raises:
        RequestError: when `layer_types` names another kind of layer, or no layer with full attention.
    """
    kinds = layer_kinds(read, family, layers)
    if not {"full_attention"} <= set(kinds) <= {"full_attention", "linear_attention"}:
        raise read.wrong("layer_types", "give full_attention or linear_attention for each layer, and both")
    return DeltaRule(
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
        **{name: read.count(key) for name, key in _DELTA_KEYS.items()},
    )


def layer_kinds(read: Reader, family: Family, layers: int) -> list[str]:
    """Read the kind of attention of each layer from `layer_types`, or from the default of the family.

    Raises:
        RequestError: when `layer_types` does not have one entry per layer, or is needed and missing.
    """
    if layers > MAX_LAYERS:
        raise read.wrong("num_hidden_layers", f"give at most {MAX_LAYERS}")
    kinds = read.raw.get("layer_types") or None
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise read.wrong("layer_types", "give one kind for each layer")
        return kinds
    listed = read.raw.get("linear_attn_config")
    if isinstance(listed, Mapping):
        full = Reader(listed, f"{read.where}:linear_attn_config").integers("full_attn_layers")
        return ["full_attention" if i + 1 in full else "linear_attention" for i in range(layers)]
    cycle = read.count("full_attention_interval", 0) or read.count("sliding_window_pattern", 0)
    if family.linear and not cycle:
        raise read.wrong("layer_types", "give the kind of attention of each layer")
    if not family.linear and (family.windows == "none" or window_size(read, family) is None):
        return ["full_attention"] * layers
    if family.windows == "listed":
        raise read.wrong("layer_types", "give the kind of attention of each layer")
    if family.linear or family.windows == "most":
        kind = "linear_attention" if family.linear else "sliding_attention"
        return [kind if cycle and (i + 1) % cycle else "full_attention" for i in range(layers)]
    first = read.count("max_window_layers", 28, least=0) if family.windows == "upper" else 0
    return ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]


def window_size(read: Reader, family: Family) -> int | None:
    """Read the number of tokens that a query sees in layers with a window; None if no layer has one."""
    if "use_sliding_window" in family.defaults and not read.boolean("use_sliding_window", False):
        return None
    return None if read.raw.get("sliding_window") is None else read.count("sliding_window")


def read_windows(read: Reader, family: Family, layers: int) -> tuple[int | None, ...]:
    """Read for each layer the number of tokens that a query sees including its own, or None for all.

    Empty when no layer has a window.

    Raises:
        RequestError: when `layer_types` names a kind of layer that the family does not have.
    """
    size = None if family.windows == "none" else window_size(read, family)
    if size is None and not read.raw.get("layer_types"):
        return ()
    kinds = layer_kinds(read, family, layers)
    possible = ["full_attention", "sliding_attention"]
    if size is None or family.windows == "all":
        possible = possible[:1] if size is None else possible[1:]
    if any(kind not in possible for kind in kinds):
        raise read.wrong("layer_types", f"give one of {', '.join(possible)} for each layer")
    windows = tuple(size if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def read_layers_without_rope(read: Reader, layers: int) -> tuple[int, ...]:
    """Read the layers without a rotary embedding (NoPE): those with a 0 in `no_rope_layers`, or each n-th.

    Raises:
        RequestError: when `no_rope_layers` does not have one entry per layer.
    """
    rotated = read.integers("no_rope_layers")
    if not rotated:
        interval = read.count("no_rope_layer_interval", 4)
        return tuple(range(interval - 1, layers, interval))
    if len(rotated) < layers:
        raise read.wrong("no_rope_layers", "give one number for each layer")
    return tuple(layer for layer in range(layers) if not rotated[layer])


def read_experts(read: Reader, family: Family, layers: int) -> Experts:
    """Read the mixture of experts of a model with `layers` layers."""
    method = "noaux_tc" if family.correction else "greedy"
    read.reject("topk_method", method, f"the implemented choice of experts is {method}")
    # Transformers 5 also writes num_local_experts.
    count = read.integer("num_local_experts" if "num_local_experts" in read.raw else "num_experts", 128)
    inner = read.integer("moe_intermediate_size", 768)
    shared = read.integer("n_shared_experts", 0) * inner
    return Experts(
        count=count,
        per_token=read.integer("num_experts_per_tok", 8),
        intermediate_size=inner,
        normalized=read.boolean("norm_topk_prob", False),
        dense_layers=tuple(layer for layer in range(layers) if not is_sparse(read, layer)),
        shared_size=read.integer("shared_expert_intermediate_size", shared),
        groups=read.integer("n_group", 1),
        groups_per_token=read.integer("topk_group", 1),
        scale=read.number("routed_scaling_factor", 1.0),
    )


def is_sparse(read: Reader, layer: int) -> bool:
    """Return whether a layer of a model with experts has experts; other layers are dense.

    Raises:
        RequestError: when one of the keys that select these layers is malformed.
    """
    kinds = read.raw.get("mlp_layer_types")
    if isinstance(kinds, list) and layer < len(kinds):
        return bool(kinds[layer] == "sparse")
    if "first_k_dense_replace" in read.raw:
        interval = read.count("moe_layer_freq", 1)
        return layer >= read.count("first_k_dense_replace", 0, least=0) and layer % interval == 0
    if layer in read.integers("mlp_only_layers"):
        return False
    return (layer + 1) % read.count("decoder_sparse_step", 1) == 0
