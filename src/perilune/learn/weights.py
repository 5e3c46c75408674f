"""What each token of a group contributes to the loss: weights, with the share of the denominator they bring.

A loss component is  L = sum over tokens of weight * token_loss / sum over groups of denominator.  Both sums
run over the whole batch of one optimizer step, so L does not depend on how the batch is cut or ordered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from perilune.data.episode import Episode
from perilune.errors import WorkFailedError

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass(frozen=True, slots=True, eq=False)
class Component:
    """One loss component of one group.

    Attributes:
        weights: one float32[T] an episode, zero where nothing is learned.
        counts: what each episode adds to the component's denominator (its tokens, or 1 for a sequence).
    """

    weights: tuple[NDArray[np.float32], ...]
    counts: tuple[float, ...]

    @property
    def denominator(self) -> float:
        """What this group adds to the component's denominator."""
        return math.fsum(self.counts)


KLEstimator = Literal["k2", "k3", "k3_corrected", "k1_reward"]


@dataclass(frozen=True, slots=True)
class Surrogate:
    """How components make a token's loss of its weight w; the same for all groups of an optimizer step.

    Attributes:
        ratio: "token": pi(token) / pi_old(token); "sequence": the geometric mean of an episode's token
            ratios, whose gradient is each token's own (GSPO, arXiv 2507.18071, eq. 14);
            "sequence-product": their product, the ratio of the whole answer (RLOO, arXiv 2402.14740).
        clip: "gain": -min(ratio w, clipped ratio w), PPO; a token outside the bounds loses its gradient.
            "weight": -w sg(clipped ratio) log pi, CISPO; every token keeps a bounded gradient.
        low, high: bounds of the ratio itself, not of its distance from 1.
        dual: with "gain", the loss of a token with w < 0 is at most -dual * w (arXiv 1912.09729, eq. 5).
        kl: estimate of the KL to the reference, x = log pi - log pi_ref. "k3": exp(-x) - 1 + x, with the
            gradient of KL(ref || pi); "k2": x^2 / 2, with the gradient of KL(pi || ref); "k3_corrected": k3
            times the token's ratio, with the gradient of KL(pi || ref) off-policy too. "k1_reward" is no
            loss: the rewards hold it (`learn.kl_reward`).
    """

    ratio: Literal["token", "sequence", "sequence-product"] = "token"
    clip: Literal["gain", "weight"] = "gain"
    low: float = 0.8
    high: float = 1.28
    dual: float | None = None
    kl: KLEstimator = "k3"


PPO = Surrogate()


@dataclass(frozen=True, slots=True, eq=False)
class ValueTargets:
    """What a critic is to learn from a group: token loss is w/2 * (value - return)^2, or the clipped one.

    Attributes:
        component: w, zero where there is nothing to learn, and the denominator.
        returns, values: one float32[T] an episode: what to predict, and what was predicted at sampling.
        clip: how far a prediction may move from `values` and still gain (arXiv 1506.02438's practice).
    """

    component: Component
    returns: tuple[NDArray[np.float32], ...]
    values: tuple[NDArray[np.float32], ...]
    clip: float


@dataclass(frozen=True, slots=True, eq=False)
class WeightedGroup:
    """What an algorithm makes of a group.

    Attributes:
        episodes: the group, failures included (their weights are zero).
        policy_gradient: signed, advantage included; `surrogate` says what its token loss is.
        cross_entropy: token loss is -w * log-prob.
        reference_kl: coefficient included: token loss is w times the surrogate's estimate of the KL.
        entropy: coefficient included: token loss is -w times the entropy of its distribution.
        surrogate: the same for all groups of an optimizer step.
        value: targets of a critic, where the algorithm has one.
        proximal: one float32[T] an episode: log-probs of pi_old where that is not the sampling policy.
        advantages: float32[G] for the reader (means over tokens where they differ within an episode), NaN
            for a failed episode; None when nothing is compared.
        dead: the rewards do not differ, so the group teaches nothing.
        figures: further figures of this group by name; over a step they are averaged, "..._max" maximised.
    """

    episodes: tuple[Episode, ...]
    policy_gradient: Component | None = None
    cross_entropy: Component | None = None
    reference_kl: Component | None = None
    entropy: Component | None = None
    surrogate: Surrogate = PPO
    value: ValueTargets | None = None
    proximal: tuple[NDArray[np.float32], ...] | None = None
    advantages: NDArray[np.float32] | None = None
    dead: bool = False
    figures: Mapping[str, float] = field(default_factory=dict)


def step_figures(groups: Sequence[WeightedGroup]) -> dict[str, float]:
    """The groups' own figures over a step: the largest of those called "..._max", the mean of others."""
    found: dict[str, list[float]] = {}
    for group in groups:
        for name, value in group.figures.items():
            found.setdefault(name, []).append(value)
    return {
        name: max(values) if name.endswith("_max") else math.fsum(values) / len(values)
        for name, values in found.items()
    }


def rewards(group: Sequence[Episode]) -> NDArray[np.float64]:
    """Rewards float64[G] of a group, NaN for episodes whose verifier failed.

    Raises:
        WorkFailedError: naming the episode whose reward is missing, NaN or infinite without a failure.
    """
    values = np.full(len(group), np.nan)
    for index, episode in enumerate(group):
        if episode.failure:
            continue
        if episode.reward is None or not math.isfinite(episode.reward):
            raise WorkFailedError(
                f"episode {episode.episode_id} of task {episode.task_id} has reward {episode.reward}",
                remedy="a verifier returns a finite score or a failure; look at its reward terms",
            )
        values[index] = episode.reward
    return values


Scale = Sequence[float | NDArray[np.float64]] | NDArray[np.float64]
"""For each of G episodes a number, NaN for one that is left out, or float64[T], a number a token."""


def aggregate(
    group: Sequence[Episode], scale: Scale, mode: Aggregation, *, constant: int | None = None
) -> Component:
    """Spread one number an episode, or a token, over tokens, so that the batch loss is the named mean.

    Episodes whose scale is NaN (failures) are not there: no weight, no share of the denominator. Tokens the
    policy did not choose (loss_mask False) carry nothing and count for nothing.

    | mode                    | batch loss                             |
    |-------------------------|----------------------------------------|
    | token-mean              | sum of token losses / number of tokens |
    | seq-mean-token-mean     | mean over episodes of their token mean |
    | seq-mean-token-sum      | mean over episodes of their token sum  |
    | seq-mean-token-sum-norm | previous / `constant`                  |

    Args:
        scale: factor of every token of an episode (its advantage, a coefficient, or 1), or of each.
        constant: the fixed length of seq-mean-token-sum-norm. Never taken from the batch: a constant that
            follows the padded width changes the learning rate at every step (Dr. GRPO, arXiv 2503.20783).

    Raises:
        ValueError: when the mode needs a positive `constant` and has none, or the reverse; when a token's
            factor is not finite.
    """
    if (mode == "seq-mean-token-sum-norm") != (constant is not None and constant > 0):
        raise ValueError(f"{mode} with constant {constant}")
    weights, counts = [], []
    for episode, value in zip(group, scale, strict=True):
        mask = episode.loss_mask
        if np.ndim(value) == 0 and np.isnan(value):
            weights.append(np.zeros(len(mask), np.float32))
            counts.append(0.0)
            continue
        length = int(mask.sum())
        share = max(length, 1) if mode == "seq-mean-token-mean" else constant or 1
        spread = np.where(mask, np.asarray(value) / share, 0.0).astype(np.float32)
        if not np.isfinite(spread).all():
            raise ValueError(f"a token of episode {episode.episode_id} has weight {value}")
        weights.append(spread)
        counts.append(float(length) if mode == "token-mean" else 1.0)
    return Component(tuple(weights), tuple(counts))
