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
        hf_class: the class in transformers, for config.json; empty if the decoder does not compute it.
        own_options: see `options`; those that do not follow from other attributes.
        activation: the activation of the feed-forward gate; "clamped" is that of gpt-oss, which bounds both
            inputs and adds one to the second.
        norm_offset: a norm weight w multiplies by 1 + w, so that zero is neutral.
        scaled_embeddings: embeddings are multiplied by sqrt(hidden_size).
        pre_norm: the input of attention and feed-forward is normalized.
        post_norm: the output of attention and feed-forward is normalized before it is added.
        parallel: attention and feed-forward share one norm and run side by side.
        norm_vectors: learned vectors per norm: 1, 2 with a bias, or 0.
        qkv_bias, out_bias, mlp_bias: biases of the attention inputs, attention output and feed-forward.
        matrices: matrices of a feed-forward network; 3 when it has a gate.
        qk_norm: queries and keys are normalized before rotation: "head" by head, over the "full" width of all
            heads, or head by head when the key of this name is true.
        output_gate: the attention output is gated by as many numbers as there are queries.
        sinks: each head learns a logit for attending to nothing: in all layers, or in those with a window.
        windows: layers with a sliding window when `layer_types` is missing: "all"; the "upper" ones, from
            `max_window_layers` on; "most", all but every n-th, n being `sliding_window_pattern`; or "listed",
            which refuses such a config.
        local_rope: layers with a window have a rotary embedding of their own.
        linear: kind of linear attention, in layers that `layer_types` or `full_attention_interval` select.
        linear_grouped: the inputs of linear attention are stacked by key head, not by kind.
        router: the function from the router's logits to scores of the experts.
        correction: each expert has a bias, which is added to its score for the choice but not to its weight.
        expert_bias: experts and their router have biases.
        fused_experts: all experts of a layer are one tensor, as in gpt-oss.
        shared_gate: the shared expert has a gate.
        names: the family's own names for keys that other families call differently.
        modules: the family's own names for modules that other families call differently. Modules with the
            same name are one.
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
        """The keys of config.json that the decoder reads and writes besides those of every family."""
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
