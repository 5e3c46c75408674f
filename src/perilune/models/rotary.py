"""The angles of rotary position embeddings."""

import math

import torch
from torch import Tensor

from perilune.models.config.rope import LinearScaling, Rope, YarnScaling


def inverse_frequencies(rope: Rope, size: int) -> Tensor:
    """Return float32[size / 2]: by how many radians per token each pair of a head rotates."""
    exponents = torch.arange(0, size, 2, device="cpu").float() / size
    frequencies = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, YarnScaling):
        return _yarn_frequencies(frequencies, rope.theta, scaling)
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = ramp.clamp(0.0, 1.0)
    return (1 - share) * frequencies / scaling.factor + share * frequencies


def rotary_scale(rope: Rope) -> float:
    """Return the factor of cosines and sines."""
    return rope.scaling.rotary_scale if isinstance(rope.scaling, YarnScaling) else 1.0


def _yarn_frequencies(frequencies: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Return YaRN's frequencies: kept for fast pairs, divided for slow ones, interpolated between."""
    size, length = 2 * len(frequencies), scaling.original_max_position_embeddings

    def pair_index(turns: float) -> float:
        """Return the fractional index of the pair with `turns` turns in the original context length."""
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_index(scaling.beta_fast), pair_index(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    width = last - first if last != first else 0.001
    stretched = ((torch.arange(len(frequencies), device="cpu").float() - first) / width).clamp(0, 1)
    return frequencies / scaling.factor * stretched + frequencies * (1 - stretched)
