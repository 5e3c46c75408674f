"""What an algorithm is: typed options, and one function from the groups of a step to weights a token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from perilune.data.episode import Episode
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
"""A figure a token that takes a forward pass of the policy as it is when the step begins: its log-prob, and
the reference's; the critic's value of the state before it, and of the state after the last token of an answer
that was cut off (one number, no others); and of the distribution it was drawn from the squared Hellinger
distance to the reference's and the entropy over log V."""

Signals = Mapping[Signal, Mapping[str, NDArray[np.float32]]]
"""float32[T] by signal and episode_id, zero where nothing is learned."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """What an algorithm may know of a step besides its groups.

    Attributes:
        max_tokens: the longest completion the run allows, a constant of the run.
        kl: coefficient of the KL to the reference policy; 0 leaves the component out.
        kl_estimator: how it is estimated.
        step: steps done before this one.
        signals: what the algorithm's `needs` asked for.
        memory: what it wants to know again at the next step and after a resume: JSON values only.
    """

    max_tokens: int
    kl: float = 0.0
    kl_estimator: KLEstimator = "k3"
    step: int = 0
    signals: Signals = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)

    def signal(self, name: Signal, episode: Episode) -> NDArray[np.float64]:
        """float64[T] of one episode.

        Raises:
            ValueError: when there is none, or not one a token.
        """
        found = self.signals.get(name, {}).get(episode.episode_id)
        if found is None or len(found) != len(episode.token_ids):
            raise ValueError(f"episode {episode.episode_id} has no {name} of its tokens")
        return found.astype(np.float64)

    def value_after(self, episode: Episode) -> float:
        """The critic's value of the state that an answer was cut off in; 0 of one that ended by itself."""
        found = self.signals.get("values_after", {}).get(episode.episode_id)
        return 0.0 if found is None else float(found[-1])


class Algorithm(BaseModel):
    """Base of all algorithms. Subclasses override `weight_group`, or `weight_groups` to compare groups.

    Attributes:
        compares: with what a reward is compared, for the figures of the report.
        centred: whether the advantages of a group that is compared within add up to 0; if not, a run stops.
        takes_step_rewards: whether process rewards are among the rewards it makes advantages of.
        sparse: whether an advantage may leave out most tokens of its answer; otherwise a run stops.
        takes_any_reward: whether a reward may be any number, also below 0, rather than a verdict.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    compares: ClassVar[Literal["group", "batch", "nothing"]] = "group"
    centred: ClassVar[bool] = True
    sparse: ClassVar[bool] = False
    takes_step_rewards: ClassVar[bool] = False
    takes_any_reward: ClassVar[bool] = True

    name: str = Field(description="which algorithm this is")

    @property
    def needs(self) -> frozenset[Signal]:
        """Signals it reads."""
        return frozenset()

    @property
    def refills(self) -> int:
        """How often a step's dead groups are replaced by new tasks before it makes do."""
        return 0

    @property
    def least_samples(self) -> int:
        """The smallest group that it can compare."""
        return 2

    def weight_groups(self, groups: Sequence[Group], context: StepContext) -> list[WeightedGroup]:
        """Weights of all groups of one step, in order.

        Raises:
            WorkFailedError: naming an episode whose reward is NaN, infinite or missing without a failure.
        """
        return [self.weight_group(group, context) for group in groups]

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        """Weights of a group that is compared with no other."""
        (found,) = self.weight_groups([group], context)
        return found

    def __call__(self, group: Group, *, max_tokens: int, kl: float = 0.0) -> WeightedGroup:
        """Weigh a group that is all there is."""
        return self.weight_group(group, StepContext(max_tokens, kl))


class PolicyGradient(Algorithm):
    """Advantages, spread over tokens in a named way. A subclass says under which surrogate."""

    aggregation: Aggregation = Field("token-mean", description="over what a token's loss is averaged")
    mask_truncated: bool = Field(
        False, description="cut-off answers count in their group's mean, but are not learned from"
    )
    entropy_bonus: float = Field(
        0.0, ge=0, description="of the policy's entropy, mean over all tokens, added to what is climbed"
    )

    @property
    @abstractmethod
    def surrogate(self) -> Surrogate:
        """The token loss that the options name."""

    def compared(
        self,
        group: Group,
        scores: Rewards,
        advantages: Scale,
        context: StepContext,
        *,
        dead: bool | None = None,
        figures: Mapping[str, float] | None = None,
    ) -> WeightedGroup:
        """Weights that carry these advantages, beside the reference KL.

        Args:
            scores: [G], NaN for an episode that is left out.
            advantages: [G], or float64[T] an episode.
            dead: whether there is nothing to learn; by default, whether the scores are equal.
        """
        judged = ~np.isnan(scores)
        scale: Scale = [a if there else np.nan for a, there in zip(advantages, judged, strict=True)]
        cut = [self.mask_truncated and episode.truncated for episode in group]
        learned: Scale = [np.nan if out else a for a, out in zip(scale, cut, strict=True)]
        kl = context.kl if context.kl_estimator != "k1_reward" else 0.0
        bonus = np.where(judged, self.entropy_bonus, np.nan)
        return WeightedGroup(
            episodes=tuple(group),
            policy_gradient=self.component(group, learned, context),
            reference_kl=self.component(group, np.where(judged, kl, np.nan), context) if kl > 0 else None,
            entropy=aggregate(group, bonus, "token-mean") if self.entropy_bonus > 0 else None,
            surrogate=replace(self.surrogate, kl=context.kl_estimator),
            advantages=np.array([_mean(a, one) for a, one in zip(scale, group, strict=True)], np.float32),
            dead=is_dead(scores) if dead is None else dead,
            figures=figures or {},
        )

    def component(self, group: Group, scale: Scale, context: StepContext) -> Component:
        """`scale` spread over tokens as `aggregation` says."""
        constant = context.max_tokens if self.aggregation == "seq-mean-token-sum-norm" else None
        return aggregate(group, scale, self.aggregation, constant=constant)


def _mean(advantage: float | NDArray[np.float64], episode: Episode) -> float:
    """Over the tokens that the policy chose, where there is one a token."""
    chosen = advantage if np.ndim(advantage) == 0 else np.asarray(advantage)[episode.loss_mask]
    return float(np.mean(chosen)) if np.size(chosen) else 0.0


class ClippedPolicyGradient(PolicyGradient):
    """Advantages under PPO's clipped objective."""

    clip_low: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped below 1 - clip_low")
    clip_high: float = Field(0.28, gt=0, description="the ratio is clipped above 1 + clip_high")
    dual_clip: float | None = Field(
        None, gt=1, description="a bad token's ratio counts at most this much; null is off"
    )

    @property
    def surrogate(self) -> Surrogate:
        return Surrogate(low=1 - self.clip_low, high=1 + self.clip_high, dual=self.dual_clip)
