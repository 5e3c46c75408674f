"""The angles of rotary position embeddings."""

import math

import torch
from torch import Tensor

from perilune.models.config.rope import LinearScaling, Rope, YarnScaling


def inverse_frequencies(rope: Rope, size: int) -> Tensor:
    """float32[size / 2], the rotation of each pair of a head in radians per token."""
    exponents = torch.arange(0, size, 2, device="cpu").float() / size
    frequencies = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, YarnScaling):
        return _interpolated(frequencies, rope.theta, scaling)
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = ramp.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def magnitude(rope: Rope) -> float:
    """Factor by which cosines and sines are multiplied."""
    return rope.scaling.magnitude if isinstance(rope.scaling, YarnScaling) else 1.0


def _interpolated(frequencies: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """YaRN's frequencies: unchanged before two bounds, divided by the factor after them, else mixed."""
    size, length = 2 * len(frequencies), scaling.original_max_position_embeddings

    def pair_with(turns: float) -> float:
        """The fractional index of the pair that makes `turns` turns within the original context length."""
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    width = last - first if last != first else 0.001
    stretched = ((torch.arange(len(frequencies), device="cpu").float() - first) / width).clamp(0, 1)
    return frequencies / scaling.factor * stretched + frequencies * (1 - stretched)
