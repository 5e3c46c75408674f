"""Constant factors that a decoder multiplies its activations by, as in Granite (IBM, 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from perilune.models.config.reader import Reader


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Factors of activations.

    Attributes:
        embedding: of embeddings.
        residual: of the output of attention and feed-forward before it is added to the residual stream.
        attention: of attention scores, in place of 1 / sqrt(D).
        logits: logits are divided by it.
    """

    embedding: float = 1.0
    residual: float = 1.0
    attention: float = 1.0
    logits: float = 1.0

    @classmethod
    def read(cls, read: Reader) -> Multipliers:
        """The factors in a config.json."""
        return cls(
            embedding=read.number("embedding_multiplier", 1.0),
            residual=read.number("residual_multiplier", 1.0),
            attention=read.number("attention_multiplier", 1.0),
            logits=read.number("logits_scaling", 1.0),
        )

    def to_hf(self) -> dict[str, float]:
        """The keys of a config.json."""
        return {
            "embedding_multiplier": self.embedding,
            "residual_multiplier": self.residual,
            "attention_multiplier": self.attention,
            "logits_scaling": self.logits,
        }
