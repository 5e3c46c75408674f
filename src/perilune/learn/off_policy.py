"""Off-policy corrections, for episodes that were sampled by another policy than the learner.

pi_learner / pi_sampler = (pi_old / pi_sampler) * (pi_learner / pi_old), with pi_old the learner at the
beginning of a batch. The first factor comes from rounding in the engine and from stale weights, the second is
the drift during the batch's updates. With "bypass", the denominator of the surrogate's ratio is pi_sampler,
so the ratio covers both factors. With "decoupled PPO" (arXiv 2110.00641), the denominator is pi_old, and a
bounded weight w = pi_old / pi_sampler multiplies the token's loss. w is computed once a batch.

Sequence-level options name their ratio: the product of an episode's token ratios, or their geometric mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from perilune.frozen import Frozen
from perilune.learn.weights import Component, WeightedGroup

MAX_LOG_RATIO = 20.0

Array = NDArray[np.float64]
Level = Literal["token", "sequence-product", "sequence-geometric"]


class OffPolicySettings(Frozen):
    """Corrections for samples of another policy. By default only the surrogate's ratio, to the sampler."""

    proximal: Literal["sampler", "learner"] = Field(
        "sampler",
        description="policy in the denominator of the surrogate's ratio. sampler: the policy that"
        " sampled; learner: the policy at the beginning of the batch (pi_old), which costs a"
        " forward pass",
    )
    weight: Literal["none", "truncate", "mask"] = Field(
        "none",
        description="weight pi_old / pi_sampler of each token, with proximal: learner. none: 1; truncate:"
        " at most the highest of `bounds`; mask: 0 outside `bounds`",
    )
    level: Level = Field(
        "token",
        description="compute the weight per token, or per answer as the product or the geometric mean of"
        " its tokens' ratios",
    )
    bounds: tuple[float, float] = Field(
        (0.0, 2.0), description="lowest and highest weight; truncate uses only the highest"
    )
    reject: Literal["none", "sequence-product", "sequence-geometric", "sequence-k3"] = Field(
        "none",
        description="leave out answers outside reject_bounds, by the product or the geometric mean of"
        " their tokens' ratios pi_old / pi_sampler, or by their mean k3",
    )
    reject_bounds: tuple[float, float] = Field(
        (0.999, 1.001),
        description="lowest and highest value of the quantity in `reject` at which an answer is kept",
    )
    mask_negative: float | None = Field(
        None,
        description="ignore answers with a negative advantage whose mean of log(pi_sampler / pi_old) over"
        " tokens is above this number; null: off",
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="ignore tokens that were sampled with weights more than this many updates old; null:"
        " no limit",
    )
    ess_target: float | None = Field(
        None,
        gt=0,
        le=1,
        description="threshold for share = effective sample size / number of answers; below it, lr is"
        " multiplied by sqrt(share / ess_target). null: off",
    )

    @model_validator(mode="after")
    def _consistent(self) -> OffPolicySettings:
        if self.weight != "none" and self.proximal == "sampler":
            raise ValueError(
                "weight would correct twice, because the ratio is to the sampler. Set proximal: learner"
            )
        for name in ("bounds", "reject_bounds"):
            low, high = getattr(self, name)
            if not 0 <= low < high:
                raise ValueError(f"{name} must be 0 <= lowest < highest. It is [{low:g}, {high:g}]")
        for name, needed in {"level": "weight", "bounds": "weight", "reject_bounds": "reject"}.items():
            if (
                getattr(self, needed) == "none"
                and getattr(self, name) != type(self).model_fields[name].default
            ):
                raise ValueError(f"{name} has no effect with {needed}: none. Set {needed}, or remove {name}")
        return self

    @property
    def needs_logprobs(self) -> bool:
        """True if the corrections need the learner's log-probs at the beginning of the batch."""
        uses_ratio = self.mask_negative is not None or self.ess_target is not None
        return self.proximal == "learner" or self.reject != "none" or uses_ratio


def correct_weights(
    groups: Sequence[WeightedGroup],
    logprobs: Mapping[str, NDArray[np.float32]],
    settings: OffPolicySettings,
    version: int,
) -> tuple[list[WeightedGroup], dict[str, float]]:
    """Correct the policy-gradient weights of a batch.

    Masked tokens keep their share of the denominator; rejected answers lose theirs.

    Args:
        logprobs: float32[T], the learner's log-probs at the beginning of the batch by episode_id; empty when
            `settings.needs_logprobs` is false.
        version: version of the learner's weights, for staleness.

    Returns:
        The corrected groups, and figures of the weights.
    """
    statistics = _WeightStatistics()
    corrected = [_correct_group(group, logprobs, settings, version, statistics) for group in groups]
    return corrected, statistics.figures(settings)


def learning_rate_scale(figures: Mapping[str, float], settings: OffPolicySettings) -> float:
    """Return the factor sqrt(min(1, ESS share / target)) of the learning rate (VCPO, arXiv 2602.17616)."""
    if settings.ess_target is None or "ess" not in figures:
        return 1.0
    return float(min(1.0, figures["ess"] / settings.ess_target) ** 0.5)


def bound_weights(
    log_weights: Array, rule: Literal["none", "truncate", "mask"], low: float, high: float
) -> Array:
    """Bound weights: at most `high` (TIS), 0 outside [low, high] (MIS, IcePop), or all 1 for "none"."""
    weights = exp_log_ratio(log_weights)
    if rule == "truncate":
        return np.minimum(weights, high)
    if rule == "mask":
        return np.where((weights >= low) & (weights <= high), weights, 0.0)
    return np.ones(len(weights))


def exp_log_ratio(log_ratio: Array) -> Array:
    """Return exp of the log-ratios, which are clipped to +-20."""
    return np.asarray(np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)))


def effective_share(weights: Array) -> float:
    """Return the effective sample size divided by n: (sum w)^2 / (n sum w^2)."""
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())) if weights.any() else 0.0


def pool_weights(log_weights: Array, level: str) -> Array:
    """Return an episode's log-weights [L], each replaced by that of the sequence unless `level` is token."""
    if level == "sequence-product":
        return np.full(len(log_weights), log_weights.sum())
    if level == "sequence-geometric":
        return np.full(len(log_weights), log_weights.mean())
    return log_weights


def _correct_group(
    group: WeightedGroup,
    logprobs: Mapping[str, NDArray[np.float32]],
    settings: OffPolicySettings,
    version: int,
    statistics: _WeightStatistics,
) -> WeightedGroup:
    component = group.policy_gradient
    if component is None:
        return group
    weights, counts, proximal = list(component.weights), list(component.counts), []
    for index, episode in enumerate(group.episodes):
        proximal.append(logprobs.get(episode.episode_id, episode.logprobs))
        mask = episode.loss_mask
        if not weights[index].any():
            continue
        log_w = (proximal[-1][mask].astype(np.float64)) - episode.logprobs[mask]
        factor = bound_weights(pool_weights(log_w, settings.level), settings.weight, *settings.bounds)
        negative = group.advantages is not None and group.advantages[index] < 0
        if negative and settings.mask_negative is not None and -log_w.mean() > settings.mask_negative:
            factor = np.zeros(len(factor))
        if settings.max_staleness is not None:
            factor = np.where(version - episode.policy_version[mask] <= settings.max_staleness, factor, 0.0)
        if rejected := _is_rejected(log_w, settings):
            factor, counts[index] = np.zeros(len(factor)), 0.0
        weights[index] = weights[index].copy()
        weights[index][mask] *= factor.astype(np.float32)
        statistics.add(log_w, factor, rejected)
    corrected = Component(tuple(weights), tuple(counts))
    return replace(
        group,
        policy_gradient=corrected,
        proximal=tuple(proximal) if settings.proximal == "learner" else None,
    )


def _is_rejected(log_w: Array, settings: OffPolicySettings) -> bool:
    """Return whether the ratio of an answer, or its k3 (the mean of w - 1 - log w), is outside the bounds."""
    if settings.reject == "none":
        return False
    if settings.reject == "sequence-k3":
        measured = float((exp_log_ratio(log_w) - 1 - log_w).mean())
    else:
        measured = float(exp_log_ratio(pool_weights(log_w, settings.reject)[:1])[0])
    low, high = settings.reject_bounds
    return not low <= measured <= high


def _log_bounded(log_w: Array, settings: OffPolicySettings) -> float:
    """Return the log of an answer's bounded weight, which at token level is the product over tokens."""
    with np.errstate(divide="ignore"):  # a weight of 0
        logs = np.log(bound_weights(pool_weights(log_w, settings.level), settings.weight, *settings.bounds))
    return float(logs.sum() if settings.level == "token" else logs[0])


class _WeightStatistics:
    """The weights of a batch, before and after their bounds."""

    def __init__(self) -> None:
        self._tokens: list[Array] = []
        self._factors: list[Array] = []
        self._rejected = 0

    def add(self, log_w: Array, factor: Array, rejected: bool) -> None:
        self._tokens.append(log_w)
        self._factors.append(factor)
        self._rejected += rejected

    def figures(self, settings: OffPolicySettings) -> dict[str, float]:
        """Return figures by name. Sequence weights are products of token ratios; `ess` ignores the bounds."""
        if not self._tokens or settings == OffPolicySettings():
            return {}
        log_w = np.concatenate(self._tokens)
        tokens, factors = exp_log_ratio(log_w), np.concatenate(self._factors)
        masked = {
            "tokens_masked": float((factors == 0).mean()),
            "answers_rejected": self._rejected / len(self._tokens),
        }
        if not settings.needs_logprobs:
            return masked
        log_sequences = np.array([logs.sum() for logs in self._tokens])
        log_bounded = np.array([_log_bounded(logs, settings) for logs in self._tokens])
        sequences, (low, high) = exp_log_ratio(log_sequences), settings.bounds
        return masked | {
            "ess": effective_share(sequences),
            "ess_bounded": effective_share(exp_log_ratio(log_bounded)),
            "weight_mean": float(tokens.mean()),
            "weight_min": float(tokens.min()),
            "weight_max": float(tokens.max()),
            "sequence_weight_mean": float(sequences.mean()),
            "sequence_weight_max": float(sequences.max()),
            "weights_above": float((tokens > high).mean()),
            "weights_below": float((tokens < low).mean()),
            "perplexity_ratio": float(np.exp(-log_w.mean())),
            "chi2_token": float((tokens**2).mean() - 1),
            "chi2_sequence_product": float((sequences**2).mean() - 1),
        }
