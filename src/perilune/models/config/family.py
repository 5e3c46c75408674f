"""A model family: what all models of one `model_type` share."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

Bias = bool | str
"""True or False, or the key of config.json with the value."""


@dataclass(frozen=True, slots=True)
class Family:
    """Properties that all models of a family share. The defaults are Llama's.

    Attributes:
        hf_class: the class in transformers, for config.json; "" if the decoder does not implement the family.
        own_options: the `options` that do not follow from other attributes.
        activation: the activation of the feed-forward gate; "clamped" is that of gpt-oss, which bounds both
            inputs and adds one to the second.
        norm_offset: whether a norm weight w multiplies by 1 + w, so that zero is neutral.
        scaled_embeddings: whether embeddings are multiplied by sqrt(hidden_size).
        pre_norm: whether the input of attention and feed-forward is normalized.
        post_norm: whether the output of attention and feed-forward is normalized before it is added.
        parallel: whether attention and feed-forward share one norm and run in parallel.
        norm_vectors: number of learned vectors per norm: 1, 2 with a bias, or 0.
        qkv_bias, out_bias, mlp_bias: biases of the attention inputs, attention output and feed-forward.
        matrices: number of matrices of a feed-forward network; 3 with a gate, otherwise 2.
        qk_norm: normalization of queries and keys before rotation: "" for none; "head" for each head alone;
            "full" over all heads together; or the config.json key that turns on "head".
        output_gate: whether a gate with one element per query element multiplies the attention output.
        sinks: layers whose heads learn an attention sink: "all", those with "windows", or "" for none.
        windows: layers with a sliding window when `layer_types` is missing: "none"; "all"; "upper" for those
            from `max_window_layers` on; "most" for all but every n-th, where n is `sliding_window_pattern`.
            With "listed", `layer_types` is required.
        local_rope: whether layers with a window have a rotary embedding of their own.
        linear: kind of linear attention, in layers that `layer_types` or `full_attention_interval` select.
        linear_grouped: whether the inputs of linear attention are stacked by key head; otherwise by kind.
        router: the function from the router's logits to scores of the experts.
        correction: whether each expert has a bias that is added to its score for the choice of experts, but
            not for their weights.
        expert_bias: whether experts and their router have biases.
        fused_experts: whether all experts of a layer share one tensor per map, as in gpt-oss.
        shared_gate: whether the shared expert has a gate.
        positions: whether the model learns embeddings of positions, as in GPT-2.
        names: the family's config.json keys that have another name in general, by their general name.
        modules: the family's modules that have another name in general, by their general name. Modules with
            the same name are stacked in one module.
        defaults: values that transformers assumes for missing keys, where they differ from the general ones.
    """

    hf_class: str = ""
    own_options: Set[str] = frozenset()
    activation: Literal["silu", "gelu_pytorch_tanh", "clamped"] = "silu"
    norm_offset: bool = False
    scaled_embeddings: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False
    norm_vectors: int = 1
    qkv_bias: Bias = "attention_bias"
    out_bias: Bias = "attention_bias"
    mlp_bias: Bias = "mlp_bias"
    matrices: int = 3
    qk_norm: str = ""
    output_gate: bool = False
    sinks: Literal["", "all", "windows"] = ""
    windows: Literal["none", "all", "upper", "most", "listed"] = "none"
    local_rope: bool = False
    linear: Literal["", "delta", "lightning", "kimi"] = ""
    linear_grouped: bool = False
    router: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False
    expert_bias: bool = False
    fused_experts: bool = False
    shared_gate: bool = False
    positions: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> frozenset[str]:
        """The keys of config.json that the decoder reads and writes for this family but not for every one."""
        options = set(self.own_options)
        if isinstance(self.qkv_bias, str):
            options.add(self.qkv_bias)
        if self.windows != "none":
            options.add("sliding_window")
        if self.windows in {"upper", "most", "listed"}:
            options.add("layer_types")
        if "use_sliding_window" in self.defaults:
            options |= {"use_sliding_window", "layer_types"}
        return frozenset(options)

    @property
    def norms(self) -> int:
        """Number of norms over the hidden size in one layer."""
        return 1 if self.parallel else 2 * (self.pre_norm + self.post_norm)

    def read(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of a config.json under the general names, with the family's defaults."""
        names = {name: raw[key] for name, key in self.names.items() if raw.get(key) is not None}
        return {**self.defaults, **raw, **names}

    @property
    def shares_expert_width(self) -> bool:
        """True if `intermediate_size` is the width of experts."""
        return self.names.get("moe_intermediate_size") == "intermediate_size"

    def module_name(self, name: str) -> str:
        return self.modules.get(name, name)
