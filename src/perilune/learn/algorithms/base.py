"""Base classes of algorithms: typed options, and a function from groups of episodes to token weights."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from perilune.data.episode import Episode
from perilune.frozen import Frozen
from perilune.learn.advantages import Rewards, is_dead
from perilune.learn.weights import (
    Aggregation,
    Component,
    KLEstimator,
    Scale,
    Surrogate,
    WeightedGroup,
    aggregate,
)

Group = Sequence[Episode]

Signal = Literal["logprobs", "reference_logprobs", "values", "values_after", "deviation", "uncertainty"]
"""A number per token from a forward pass, computed with the weights at the beginning of the step.

- logprobs, reference_logprobs: log-prob of the token under the policy and under the reference.
- values: the critic's value of the state before the token.
- values_after: the critic's value of the state after the last token of a truncated answer; one number.
- deviation: squared Hellinger distance between the policy's and the reference's distribution.
- uncertainty: entropy of the policy's distribution, divided by log V.
"""

Signals = Mapping[Signal, Mapping[str, NDArray[np.float32]]]
"""float32[T] by signal and episode_id; 0 at masked tokens."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """The context of a step that algorithms need besides its groups.

    Attributes:
        max_tokens: token limit of an episode after its prompt, constant within a run.
        kl: coefficient of the KL to the reference policy; 0 omits the component.
        kl_estimator: how the KL is estimated.
        step: number of steps completed before this one.
        signals: the signals in the algorithm's `needs`.
        memory: the algorithm's state, which is saved in checkpoints; JSON values only.
    """

    max_tokens: int
    kl: float = 0.0
    kl_estimator: KLEstimator = "k3"
    step: int = 0
    signals: Signals = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)

    def signal(self, name: Signal, episode: Episode) -> NDArray[np.float64]:
        """Return a signal of one episode, float64[T]; 0 if the episode failed or has no sampled token.

        Raises:
            ValueError: when the signal is missing or does not have one value per token.
        """
        if episode.failure or not episode.loss_mask.any():
            return np.zeros(len(episode.token_ids))
        values = self.signals.get(name, {}).get(episode.episode_id)
        if values is None or len(values) != len(episode.token_ids):
            raise ValueError(f"episode {episode.episode_id} lacks the signal {name}, one value per token")
        return values.astype(np.float64)

    def value_after(self, episode: Episode) -> float:
        """Return the critic's value of the state after a truncated answer; 0 for a complete answer."""
        values = self.signals.get("values_after", {}).get(episode.episode_id)
        return 0.0 if values is None else float(values[-1])


class Algorithm(Frozen):
    """Base of all algorithms. Subclasses override `weight_group`, or `weight_groups` to compare groups.

    Attributes:
        compares: the episodes with which a reward is compared, for the report and the checks.
        centred: whether the advantages of a group must add up to 0. If they do not, the run stops.
        takes_step_rewards: whether the algorithm includes process rewards in its returns.
        sparse: whether most tokens of an answer may have no weight although its advantage is not 0. If this
            is False, such an answer stops the run.
        takes_any_reward: whether rewards may be arbitrary numbers, including negative ones.
    """

    compares: ClassVar[Literal["group", "batch", "nothing"]] = "group"
    centred: ClassVar[bool] = True
    sparse: ClassVar[bool] = False
    takes_step_rewards: ClassVar[bool] = False
    takes_any_reward: ClassVar[bool] = True

    name: str = Field(description="name of the algorithm")

    @property
    def needs(self) -> frozenset[Signal]:
        """The signals that the algorithm reads."""
        return frozenset()

    @property
    def refills(self) -> int:
        """Maximum number of times that a step may replace its dead groups by groups of new tasks."""
        return 0

    @property
    def least_samples(self) -> int:
        """The smallest group size with which the algorithm can learn."""
        return 2

    def weight_groups(self, groups: Sequence[Group], context: StepContext) -> list[WeightedGroup]:
        """Compute the token weights of all groups of one step, in order.

        Raises:
            WorkFailedError: naming an episode whose reward is NaN, infinite or missing without a failure.
        """
        return [self.weight_group(group, context) for group in groups]

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        """Compute the token weights of a single group."""
        (weighted,) = self.weight_groups([group], context)
        return weighted

    def __call__(self, group: Group, *, max_tokens: int, kl: float = 0.0) -> WeightedGroup:
        """Compute the token weights of a group that is the whole batch."""
        return self.weight_group(group, StepContext(max_tokens, kl))


class PolicyGradient(Algorithm):
    """Base of algorithms that spread advantages over tokens. Subclasses define the surrogate."""

    aggregation: Aggregation = Field("token-mean", description="how token losses are averaged")
    mask_truncated: bool = Field(
        False, description="do not learn from truncated answers; they still count in their group's mean"
    )
    entropy_bonus: float = Field(
        0.0, ge=0, description="coefficient of the policy's mean entropy per token in the objective"
    )

    @property
    @abstractmethod
    def surrogate(self) -> Surrogate:
        """The token loss that the options define."""

    def weight_tokens(
        self,
        group: Group,
        scores: Rewards,
        advantages: Scale,
        context: StepContext,
        *,
        dead: bool | None = None,
        figures: Mapping[str, float] | None = None,
    ) -> WeightedGroup:
        """Spread advantages over tokens, and add the reference KL and the entropy bonus.

        Args:
            scores: float64[G], NaN for an episode to leave out.
            advantages: float64[G], or float64[T] per episode.
            dead: whether the group gives no gradient; by default, whether all scores are equal.
            figures: further figures of the group.
        """
        learned = self.learned(group, scores)
        scale = [np.nan if np.isnan(score) else a for a, score in zip(advantages, scores, strict=True)]
        gain: Scale = [a if is_learned else np.nan for a, is_learned in zip(scale, learned, strict=True)]
        kl = context.kl if context.kl_estimator != "k1_reward" else 0.0
        bonus = np.where(learned, self.entropy_bonus, np.nan)
        return WeightedGroup(
            episodes=tuple(group),
            policy_gradient=self.component(group, gain, context),
            reference_kl=self.component(group, np.where(learned, kl, np.nan), context) if kl > 0 else None,
            entropy=aggregate(group, bonus, "token-mean") if self.entropy_bonus > 0 else None,
            surrogate=replace(self.surrogate, kl=context.kl_estimator),
            advantages=np.array([_mean(a, e) for a, e in zip(scale, group, strict=True)], np.float32),
            dead=is_dead(scores) if dead is None else dead,
            figures=figures or {},
        )

    def learned(self, group: Group, scores: Rewards) -> NDArray[np.bool_]:
        """Return bool[G]: the episodes with a score, without those that `mask_truncated` leaves out."""
        masked = np.array([self.mask_truncated and episode.truncated for episode in group], np.bool_)
        return np.asarray(~np.isnan(scores) & ~masked)

    def component(self, group: Group, scale: Scale, context: StepContext) -> Component:
        """Spread `scale` over tokens according to `aggregation`."""
        constant = context.max_tokens if self.aggregation == "seq-mean-token-sum-norm" else None
        return aggregate(group, scale, self.aggregation, constant=constant)


def _mean(advantage: float | NDArray[np.float64], episode: Episode) -> float:
    """Return the advantage, or its mean over the tokens that the policy sampled."""
    sampled = advantage if np.ndim(advantage) == 0 else np.asarray(advantage)[episode.loss_mask]
    return float(np.mean(sampled)) if np.size(sampled) else 0.0


class ClippedPolicyGradient(PolicyGradient):
    """Base of algorithms with PPO's clipped objective."""

    clip_low: float = Field(0.2, gt=0, lt=1, description="clip ratios below 1 - clip_low")
    clip_high: float = Field(0.28, gt=0, description="clip ratios above 1 + clip_high")
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="upper bound of the ratio of tokens with a negative advantage (dual-clip PPO); null:"
        " no bound",
    )

    @property
    def surrogate(self) -> Surrogate:
        return Surrogate(low=1 - self.clip_low, high=1 + self.clip_high, dual=self.dual_clip)
