"""How fast each pair of a head turns, in torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from perilune.models.config.rope import LinearScaling, Rope


def inverse_frequencies(rope: Rope, size: int) -> Tensor:
    """float32[size / 2] rotation speed of each pair of a head, in radians a token."""
    exponents = torch.arange(0, size, 2, device="cpu").float() / size
    frequencies = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = ramp.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
