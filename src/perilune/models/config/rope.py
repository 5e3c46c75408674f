"""Rotary position embeddings: base and frequency scaling, read from config.json and written to it.

Sources: RoFormer (Su et al., 2021); linear scaling: position interpolation (Chen et al., 2023); scaling by
wavelength: Llama 3.1; YaRN (Peng et al., arXiv 2309.00071), with DeepSeek's factors on attention scores.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from perilune.models.config.family import Family
from perilune.models.config.reader import Reader


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Multiplies all wavelengths by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1: stretches long wavelengths, keeps short ones, interpolates between.

    Attributes:
        factor: multiplies the longest wavelengths.
        low_freq_factor: wavelengths above original length / this are stretched fully.
        high_freq_factor: wavelengths below original length / this are kept.
        original_max_position_embeddings: context length before scaling, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: stretches pairs with few rotations within the original context, and keeps pairs with many.

    Attributes:
        factor: multiplies the wavelengths of pairs with fewer than `beta_slow` rotations.
        original_max_position_embeddings: context length before scaling, in tokens.
        beta_fast: number of rotations from which a pair is kept.
        beta_slow: number of rotations below which a pair is stretched fully.
        mscale, mscale_all_dim: DeepSeek's parameters of `rotary_scale` and `score_scale`.
        attention_factor: multiplies rotated queries and keys; by default computed from the other attributes.
        truncate: whether the bounds of the interpolation are rounded to whole pairs.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def rotary_scale(self) -> float:
        """Factor of rotated queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    @property
    def score_scale(self) -> float:
        """Factor of attention scores in latent attention."""
        return self._growth(self.mscale_all_dim or 0.0) ** 2

    def _growth(self, rate: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * rate * math.log(self.factor) + 1.0


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of a layer: pair i of R / 2 rotates by theta^(-2 i / R) radians per token, scaled.

    Attributes:
        theta: base of the frequencies.
        scaling: scaling of the frequencies for longer contexts, if any.
        fraction: share of a head that is rotated, its first R = fraction * D elements.
    """

    theta: float
    scaling: RopeScaling | None = None
    fraction: float = 1.0

    def width(self, size: int) -> int:
        """Return R for heads of `size` elements."""
        return int(size * self.fraction)

    def to_hf(self) -> dict[str, Any]:
        """Return an entry of `rope_parameters` (transformers 5)."""
        partial = {} if self.fraction == 1 else {"partial_rotary_factor": self.fraction}
        scaling = scaling_to_hf(self.scaling) or {}
        return {"rope_type": "default", **scaling, **partial, "rope_theta": self.theta}


def scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return `rope_scaling` (transformers 4)."""
    if scaling is None:
        return None
    kind = next(name for name, scaling_class in _KINDS.items() if isinstance(scaling, scaling_class))
    values = {name: value for name, value in dataclasses.asdict(scaling).items() if value is not None}
    return {"rope_type": kind, **values}


def read_ropes(read: Reader, family: Family) -> tuple[Rope, Rope | None]:
    """Read the rotary embedding of a model, and that of layers with a window when it differs.

    Transformers 5 writes `rope_parameters`, by kind of layer when there are two; transformers 4 writes
    `rope_theta`, `rope_scaling` and `rope_local_base_freq`.

    Raises:
        RequestError: on a malformed scaling or one that is not implemented.
    """
    theta = read.number("rope_theta", 1e4)
    local = read.optional_number("rope_local_base_freq")
    partial = "partial_rotary_factor" in family.options
    fraction = read.number("partial_rotary_factor", 1.0) if partial else None
    local_rope = Rope(local or theta) if family.local_rope else None
    if read.raw.get("rope_parameters") is not None:
        nested = read.inner("rope_parameters")
        if "full_attention" in nested.raw and not family.local_rope:
            raise read.wrong("rope_parameters", "give one rotary embedding for all layers")
        if "full_attention" in nested.raw:
            rope = _rope(nested.inner("full_attention", rope_theta=theta), fraction)
            return rope, _rope(nested.inner("sliding_attention", rope_theta=local or theta), fraction)
        return _rope(read.inner("rope_parameters", rope_theta=theta), fraction), local_rope
    if read.raw.get("rope_scaling") is None:
        return Rope(theta, None, fraction or 1.0), local_rope
    return _rope(read.inner("rope_scaling", rope_theta=theta), fraction), local_rope


def _rope(inner: Reader, fraction: float | None) -> Rope:
    """Read the rotary embedding that `inner` describes; `fraction` is the default share of a head."""
    if fraction is None:
        only_whole = "only rotary embeddings of the whole head are implemented"
        inner.reject("partial_rotary_factor", 1.0, only_whole)
    else:
        fraction = inner.number("partial_rotary_factor", fraction)
    return Rope(inner.number("rope_theta", 0.0), _scaling(inner), fraction or 1.0)


def _scaling(inner: Reader) -> RopeScaling | None:
    kind = inner.raw.get("rope_type", inner.raw.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(inner.number("factor", 0.0))
    if kind == "yarn":
        return _yarn(inner)
    if kind != "llama3":
        raise inner.unsupported("rope_type", f"the implemented kinds are default, {', '.join(_KINDS)}")
    return Llama3Scaling(
        factor=inner.number("factor", 0.0),
        low_freq_factor=inner.number("low_freq_factor", 0.0),
        high_freq_factor=inner.number("high_freq_factor", 0.0),
        original_max_position_embeddings=inner.integer("original_max_position_embeddings"),
    )


def _yarn(inner: Reader) -> YarnScaling:
    if inner.number("rope_theta", 0.0) <= 1:
        raise inner.wrong("rope_theta", "give a number above 1")
    return YarnScaling(
        factor=inner.number("factor", 0.0),
        original_max_position_embeddings=inner.count("original_max_position_embeddings"),
        beta_fast=inner.optional_number("beta_fast") or 32.0,
        beta_slow=inner.optional_number("beta_slow") or 1.0,
        mscale=inner.optional_number("mscale"),
        mscale_all_dim=inner.optional_number("mscale_all_dim"),
        attention_factor=inner.optional_number("attention_factor"),
        truncate=inner.boolean("truncate", True),
    )


_KINDS = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}
