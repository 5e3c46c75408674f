"""Token weights: how much each token of a group contributes to each component of the loss.

A loss component is  L = sum over tokens of weight * token_loss / sum over groups of denominator.  Both sums
run over the whole batch of one optimizer step, so L does not depend on micro-batches or their order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
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
        weights: float32[T] per episode, 0 at tokens that are not learned.
        counts: share of each episode in the denominator (its number of tokens, or 1 for a sequence).
    """

    weights: tuple[NDArray[np.float32], ...]
    counts: tuple[float, ...]

    @property
    def denominator(self) -> float:
        """The group's share of the component's denominator."""
        return math.fsum(self.counts)


KLEstimator = Literal["k2", "k3", "k3_corrected", "k1_reward"]


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The token loss as a function of the weight w; the same for all groups of an optimizer step.

    Attributes:
        ratio: "token": pi(token) / pi_old(token); "sequence": the geometric mean of an episode's token
            ratios, with a gradient for each token (GSPO, arXiv 2507.18071, eq. 14);
            "sequence-product": their product, the ratio of the whole answer (RLOO, arXiv 2402.14740).
        clip: "gain": -min(ratio w, clipped ratio w) as in PPO; a token whose ratio is beyond the bound in the
            direction of w has no gradient. "weight": -w sg(clipped ratio) log pi as in CISPO; every token
            keeps a bounded gradient.
        low, high: bounds of the ratio itself, not of its distance from 1.
        dual: with "gain", the loss of a token with w < 0 is at most -dual * w (arXiv 1912.09729, eq. 5).
        kl: estimate of the KL to the reference, x = log pi - log pi_ref. "k3": exp(-x) - 1 + x, with the
            gradient of KL(ref || pi); "k2": x^2 / 2, with the gradient of KL(pi || ref); "k3_corrected": k3
            times the token's ratio, with the gradient of KL(pi || ref) off-policy too. "k1_reward" is not
            a loss: it is subtracted from the rewards (`learn.kl_reward`).
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
    """Targets of a critic. The token loss is w/2 * (value - return)^2, or the clipped version of it.

    Attributes:
        component: the weights w and their denominator.
        returns, values: float32[T] per episode: the targets, and the predictions before the update.
        clip: a prediction that has moved towards its return by more than this from `values` has no gradient.
    """

    component: Component
    returns: tuple[NDArray[np.float32], ...]
    values: tuple[NDArray[np.float32], ...]
    clip: float


@dataclass(frozen=True, slots=True, eq=False)
class WeightedGroup:
    """A group with the token weights that an algorithm computed.

    Attributes:
        episodes: the group, including failures, whose weights are 0.
        policy_gradient: signed weights that include the advantage; `surrogate` defines the token loss.
        cross_entropy: the token loss is -w * log-prob.
        reference_kl: the token loss is w times the surrogate's KL estimate; w includes the coefficient.
        entropy: the token loss is -w times the entropy; w includes the coefficient.
        surrogate: the same for all groups of an optimizer step.
        value: targets of a critic, if the algorithm has one.
        proximal: float32[T] per episode: log-probs of pi_old, if pi_old is not the sampling policy.
        advantages: float32[G] for reports (the mean over tokens if they differ within an episode), NaN for
            a failed episode; None if the algorithm has no advantages.
        dead: the rewards are equal, so the group gives no gradient, or with PPO only noise.
        figures: further figures by name. A step reports their mean, and the maximum of "..._max".
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

    @property
    def components(self) -> dict[str, Component]:
        """The loss components that the group has, by their names in `COMPONENTS`."""
        parts = {name: getattr(self, name) for name in COMPONENTS if getattr(self, name) is not None}
        return parts | ({"value": self.value.component} if self.value is not None else {})

    @property
    def has_weights(self) -> bool:
        """True if any token of the group is learned."""
        return any(weights.any() for part in self.components.values() for weights in part.weights)


COMPONENTS = ("policy_gradient", "cross_entropy", "reference_kl", "entropy", "value")
"""The components of the loss."""


def step_figures(groups: Sequence[WeightedGroup]) -> dict[str, float]:
    """Merge the groups' figures over a step: the maximum of figures named "..._max", the mean of others."""
    by_name: dict[str, list[float]] = {}
    for group in groups:
        for name, value in group.figures.items():
            by_name.setdefault(name, []).append(value)
    return {name: max(values) if name.endswith("_max") else fmean(values) for name, values in by_name.items()}


def rewards(group: Sequence[Episode]) -> NDArray[np.float64]:
    """Return the rewards float64[G] of a group, NaN for episodes whose verifier failed.

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
                remedy="make the verifier return a finite score or a failure; check its reward terms",
            )
        values[index] = episode.reward
    return values


Scale = Sequence[float | NDArray[np.float64]] | NDArray[np.float64]
"""One number per episode (NaN leaves the episode out) or float64[T], one number per token."""


def aggregate(
    group: Sequence[Episode], scale: Scale, mode: Aggregation, *, constant: int | None = None
) -> Component:
    """Spread one number per episode, or per token, over tokens, so that the batch loss is the mean `mode`.

    Episodes whose scale is NaN (failures) have no weight and no share of the denominator. Tokens that the
    policy did not sample (loss_mask False) have no weight and are not counted.

    | mode                    | batch loss                             |
    |-------------------------|----------------------------------------|
    | token-mean              | sum of token losses / number of tokens |
    | seq-mean-token-mean     | mean over episodes of their token mean |
    | seq-mean-token-sum      | mean over episodes of their token sum  |
    | seq-mean-token-sum-norm | previous / `constant`                  |

    Args:
        scale: factor of an episode's tokens (its advantage, a coefficient, or 1), or one per token.
        constant: the fixed length of seq-mean-token-sum-norm. It must not depend on the batch: a constant
            that follows the longest answer changes the learning rate each step (Dr. GRPO, arXiv 2503.20783).

    Raises:
        ValueError: when `constant` is missing or not positive for seq-mean-token-sum-norm, or given for
            another mode; when a token's factor is not finite.
    """
    if (mode == "seq-mean-token-sum-norm") != (constant is not None and constant > 0):
        raise ValueError(f"aggregation {mode} with constant {constant}")
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
