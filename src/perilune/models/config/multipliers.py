"""Constant factors that a decoder multiplies its activations by, as in Granite (IBM, 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from perilune.models.config.reader import Reader


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Factors of activations.

    Attributes:
        embedding: factor of the embeddings.
        residual: factor of the outputs of attention and feed-forward, which are added to the residual stream.
        attention: factor of attention scores, in place of 1 / sqrt(D).
        logits: divisor of the logits.
    """

    embedding: float = 1.0
    residual: float = 1.0
    attention: float = 1.0
    logits: float = 1.0

    @classmethod
    def read(cls, read: Reader) -> Multipliers:
        """Read the factors in a config.json."""
        return cls(**{name: read.number(key, 1.0) for name, key in _KEYS.items()})

    def to_hf(self) -> dict[str, float]:
        return {key: getattr(self, name) for name, key in _KEYS.items()}


_KEYS = {
    **{name: f"{name}_multiplier" for name in ("embedding", "residual", "attention")},
    "logits": "logits_scaling",
}
