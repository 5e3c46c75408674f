"""In what the layers of one decoder differ: how far they look back, and whether they have experts."""

from __future__ import annotations

from dataclasses import dataclass

from perilune.models.config.families import Family
from perilune.models.config.reader import Reader

_MOST_LAYERS = 10_000  # that are listed one by one on a file's word
_KINDS = {"all": ("sliding_attention",), "some": ("full_attention", "sliding_attention")}


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the feed-forward network.

    Attributes:
        count: experts of a layer.
        per_token: experts that each token goes through.
        intermediate_size: inner width of one expert.
        normalised: whether the weights of the chosen experts are made to sum to one.
        dense_layers: layers that have a plain feed-forward network nevertheless.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalised: bool = True
    dense_layers: tuple[int, ...] = ()


def read_windows(read: Reader, family: Family, layers: int) -> tuple[int | None, ...]:
    """Of each layer, how many tokens a query sees, its own included, or None for all; empty when all see all.

    Raises:
        RequestError: when `layer_types` names a kind of layer that the family has not.
    """
    size = _window_size(read, family)
    kinds = read.raw.get("layer_types") or None
    if kinds is not None:
        possible = ["full_attention"] if size is None else list(_KINDS[family.windows])
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in possible for kind in kinds):
            raise read.wrong("layer_types", f"one a layer, of: {', '.join(possible)}")
    if size is None:
        return ()
    if layers > _MOST_LAYERS:
        raise read.wrong("num_hidden_layers", f"at most {_MOST_LAYERS} with sliding windows")
    if family.windows == "all":
        return (size,) * layers
    if kinds is not None:
        windowed = [kind == "sliding_attention" for kind in kinds]
    elif "sliding_window_pattern" in read.raw:
        period = read.integer("sliding_window_pattern")
        windowed = [(layer + 1) % max(period, 1) > 0 for layer in range(layers)]
    else:
        first = read.integer("max_window_layers", 28)
        windowed = [layer >= first for layer in range(layers)]
    return tuple(size if is_windowed else None for is_windowed in windowed) if any(windowed) else ()


def _window_size(read: Reader, family: Family) -> int | None:
    optional = "use_sliding_window" in family.options
    if family.windows == "none" or (optional and not read.boolean("use_sliding_window", False)):
        return None
    return None if read.raw.get("sliding_window") is None else read.integer("sliding_window")


def read_experts(read: Reader, layers: int) -> Experts:
    """The mixture of experts of a model of that many layers."""
    # Transformers 5 also calls them local.
    count = read.integer("num_local_experts" if "num_local_experts" in read.raw else "num_experts", 128)
    step, dense = read.integer("decoder_sparse_step", 1), set(read.integers("mlp_only_layers"))
    if layers > _MOST_LAYERS:
        raise read.wrong("num_hidden_layers", f"at most {_MOST_LAYERS} with experts")
    dense |= {layer for layer in range(layers) if (layer + 1) % max(step, 1)}
    return Experts(
        count=count,
        per_token=read.integer("num_experts_per_tok", 8),
        intermediate_size=read.integer("moe_intermediate_size", 768),
        normalised=read.boolean("norm_topk_prob", False),
        dense_layers=tuple(sorted(dense)),
    )
