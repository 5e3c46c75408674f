"""Concepts by which architectures differ, each with the function of Perilune's decoder that implements it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perilune.models.card.layers import Attention, LatentAttention, LinearAttention, Mixer
from perilune.models.card.model_card import ModelCard
from perilune.models.config.families import FAMILIES
from perilune.models.config.family import Family


@dataclass(frozen=True, slots=True)
class Concept:
    """One concept, such as grouped-query attention.

    Attributes:
        name, title, text: a short name, a full name and an explanation.
        source: the publication.
        code: the function that implements the concept, as module:qualified.name; "" if the decoder does not
            implement it.
    """

    name: str
    title: str
    text: str
    source: str
    code: str = ""


CONCEPTS = (
    Concept(
        "GQA",
        "Grouped-query attention",
        "Several query heads share one key-value head, so the cache is smaller by the factor heads / "
        "kv_heads. With a single key-value head, this is multi-query attention.",
        "Ainslie et al., arXiv 2305.13245",
        "perilune.models.decoder:SelfAttention.forward",
    ),
    Concept(
        "MLA",
        "Multi-head latent attention",
        "For each token, the cache holds one compressed vector and a small rotary key, which all heads "
        "share. The keys and values of each head are projections of the compressed vector.",
        "DeepSeek-V2, arXiv 2405.04434",
        "perilune.models.latent:LatentAttention.forward",
    ),
    Concept(
        "SWA",
        "Sliding-window attention",
        "A token attends only to the last W tokens, so the layer's cache stops growing at W tokens. "
        "Most models mix such layers with layers that attend to all tokens.",
        "Beltagy et al., arXiv 2004.05150",
        "perilune.models.attention:PackedAttention.__call__",
    ),
    Concept(
        "QK norm",
        "Query-key norm",
        "Queries and keys are normalized before the rotary embedding, so that attention scores stay bounded "
        "in training.",
        "Henry et al., arXiv 2010.04245",
        "perilune.models.decoder:SelfAttention.qk_norm_weight",
    ),
    Concept(
        "NoPE",
        "Layers without position embedding",
        "Some layers skip the rotary embedding. These layers know the order of tokens only from the causal "
        "mask, and stay unchanged when the rotary base is raised for a longer context.",
        "Kazemnejad et al., arXiv 2305.19466",
        "perilune.models.config.decoder_config:DecoderConfig.layer_rope",
    ),
    Concept(
        "Gated DeltaNet",
        "Gated delta rule",
        "A recurrence replaces attention: a gate decays one matrix per head, and each token corrects what "
        "this matrix returns for the token's key. The state has the same size for every sequence length.",
        "Yang et al., arXiv 2412.06464",
        "perilune.models.delta:GatedDeltaNet.forward",
    ),
    Concept(
        "MoE",
        "Mixture of experts",
        "A router chooses a few of many feed-forward networks (experts) for each token. Memory grows with "
        "the number of all experts, compute only with the number of chosen experts.",
        "Shazeer et al., arXiv 1701.06538",
        "perilune.models.feed_forward:MixtureOfExperts.route",
    ),
)


def find_concepts(config: Mapping[str, Any], card: ModelCard) -> list[str]:
    """Return the names of the concepts that a model uses, in the order of `CONCEPTS`."""
    inner = config.get("text_config")
    raw = inner if isinstance(inner, Mapping) else config
    family = FAMILIES.get(card.model_type, Family())
    mixers = [layer.mixer for layer in card.layers]
    norm = family.qk_norm
    used = {
        "GQA": any(isinstance(mixer, Attention) and mixer.kv_heads < mixer.heads for mixer in mixers),
        "MLA": any(isinstance(mixer, LatentAttention) for mixer in mixers),
        "SWA": any(is_windowed(mixer, card) for mixer in mixers),
        "QK norm": norm in ("head", "full") or raw.get(norm) is True,
        "NoPE": bool(raw.get("no_rope_layer_interval") or 0 in _listed(raw.get("no_rope_layers"))),
        "Gated DeltaNet": any(
            isinstance(mixer, LinearAttention) and mixer.kind == "gated delta net" for mixer in mixers
        ),
        "MoE": any(layer.feed_forward.experts > 1 for layer in card.layers),
    }
    return [concept.name for concept in CONCEPTS if used[concept.name]]


def is_windowed(mixer: Mixer, card: ModelCard) -> bool:
    """Return whether the window is shorter than the model's context."""
    return mixer.window is not None and mixer.window < card.max_positions


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
