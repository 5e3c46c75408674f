"""GRPO and its relatives: each reward is compared with the other rewards of its group."""

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from perilune.errors import WorkFailedError
from perilune.learn.advantages import Rewards, centred, is_dead, leave_one_out, standardized
from perilune.learn.algorithms.base import ClippedPolicyGradient, Group, PolicyGradient, StepContext
from perilune.learn.weights import Aggregation, Surrogate, WeightedGroup, rewards


class GroupRelative(PolicyGradient):
    """Base of algorithms whose advantages depend only on the rewards of the group."""

    @abstractmethod
    def advantages(self, scores: Rewards) -> Rewards:
        """Return the advantages float64[G] of rewards float64[G]; NaN stays NaN."""

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        scores = rewards(group)
        return self.weight_tokens(group, scores, self.advantages(scores), context)


class GRPO(GroupRelative, ClippedPolicyGradient):
    """A = (r - mean) / (std + 1e-4), averaged over all tokens of the batch.

    Shao et al., arXiv 2402.03300, with the token mean of DAPO (arXiv 2503.14476): the mean over each
    sequence gives the tokens of long wrong answers a smaller penalty and so makes answers longer.
    """

    name: Literal["grpo"] = Field("grpo", description="name of the algorithm")

    def advantages(self, scores: Rewards) -> Rewards:
        return standardized(scores)


class DrGRPO(GroupRelative, ClippedPolicyGradient):
    """A = r - mean; each sequence is summed and divided by the token limit.

    Liu et al., arXiv 2503.20783. Without the division by the group's standard deviation, all tasks have the
    same weight. Without the division by the answer's length, all tokens have the same weight. Equal to RLOO
    up to a constant.
    """

    name: Literal["dr_grpo"] = Field("dr_grpo", description="name of the algorithm")
    aggregation: Aggregation = Field("seq-mean-token-sum-norm", description="how token losses are averaged")

    def advantages(self, scores: Rewards) -> Rewards:
        return centred(scores)


class RLOO(GroupRelative, ClippedPolicyGradient):
    """A = r - mean of the other rewards; each sequence is summed and divided by the token limit.

    Ahmadian et al., arXiv 2402.14740. The baseline does not depend on the episode itself, so the gradient of
    the expected reward is unbiased. The advantages are K / (K - 1) times those of Dr. GRPO.

    The paper treats an answer as one action, whose ratio is the product of its tokens' ratios. On-policy all
    ratios are 1 and both versions have the same gradient. Off-policy the variance of the product grows with
    the length.
    """

    name: Literal["rloo"] = Field("rloo", description="name of the algorithm")
    aggregation: Aggregation = Field("seq-mean-token-sum-norm", description="how token losses are averaged")
    ratio: Literal["token", "sequence-product"] = Field(
        "token",
        description="ratio that is clipped. token: that of each token; sequence-product: that of the"
        " whole answer, as in TRL",
    )

    @property
    def surrogate(self) -> Surrogate:
        return replace(super().surrogate, ratio=self.ratio)

    def advantages(self, scores: Rewards) -> Rewards:
        return leave_one_out(scores)


class MaxRL(GroupRelative, ClippedPolicyGradient):
    """A = (r - mean) / mean; each sequence is summed and divided by the token limit.

    arXiv 2602.02710. With binary rewards the expected gradient is that of the log of the pass rate p, up to
    the finite group size: as in maximum likelihood, a task has weight 1 / p.
    """

    takes_any_reward: ClassVar[bool] = False

    name: Literal["maxrl"] = Field("maxrl", description="name of the algorithm")
    aggregation: Aggregation = Field("seq-mean-token-sum-norm", description="how token losses are averaged")

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        lowest = np.nanmin(rewards(group), initial=0.0)
        if lowest < 0:
            raise WorkFailedError(
                f"task {group[0].task_id} has a reward of {lowest:g}; maxrl divides by the mean reward",
                remedy="use rewards of at least 0, or another algorithm",
            )
        return super().weight_group(group, context)

    def advantages(self, scores: Rewards) -> Rewards:
        return centred(scores) if is_dead(scores) else centred(scores) / np.nanmean(scores)


class GSPO(GroupRelative, ClippedPolicyGradient):
    """GRPO's advantages with one ratio per answer, averaged over answers.

    Zheng et al., arXiv 2507.18071. The ratio is the geometric mean of the token ratios and is clipped for
    the whole answer, which averages the noise of single tokens (above all with a mixture of experts). The
    ratio varies less than token ratios, so its bounds are about a thousand times closer to 1.
    """

    name: Literal["gspo"] = Field("gspo", description="name of the algorithm")
    aggregation: Aggregation = Field("seq-mean-token-mean", description="how token losses are averaged")
    clip_low: float = Field(3e-4, gt=0, lt=1, description="clip ratios below 1 - clip_low")
    clip_high: float = Field(4e-4, gt=0, description="clip ratios above 1 + clip_high")

    @property
    def surrogate(self) -> Surrogate:
        return replace(super().surrogate, ratio="sequence")

    def advantages(self, scores: Rewards) -> Rewards:
        return standardized(scores)


class CISPO(GroupRelative):
    """GRPO's advantages with the token loss -sg(clipped ratio) A log pi.

    MiniMax, arXiv 2506.13585. PPO's clip removes the gradient of rare but decisive tokens; CISPO only bounds
    their weight. The bounds apply to the ratio itself: an upper bound below 1 would shrink the gradient of
    every token, even on-policy.
    """

    name: Literal["cispo"] = Field("cispo", description="name of the algorithm")
    ratio_min: float = Field(0.0, ge=0, le=1, description="lower bound of the ratio")
    ratio_max: float = Field(5.0, ge=1, description="upper bound of the ratio")

    @property
    def surrogate(self) -> Surrogate:
        return Surrogate(clip="weight", low=self.ratio_min, high=self.ratio_max)

    def advantages(self, scores: Rewards) -> Rewards:
        return standardized(scores)


class DAPO(ClippedPolicyGradient):
    """GRPO with a penalty for long answers and dynamic sampling: dead groups are replaced by new tasks.

    Yu et al., arXiv 2503.14476: clip-higher, dynamic sampling, token mean over the batch, overlong shaping.
    A group is dead when its rewards are equal before the length penalty.
    """

    name: Literal["dapo"] = Field("dapo", description="name of the algorithm")
    max_refills: int = Field(
        10,
        ge=0,
        description="maximum number of times that a step replaces its dead groups, whose rewards are all"
        " equal, by groups of new tasks",
    )
    overlong_buffer: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="share of max_tokens, at its end, over which the length penalty rises linearly from"
        " 0; 0: no penalty",
    )
    overlong_penalty: float = Field(
        1.0, ge=0, description="length penalty of an answer with max_tokens tokens"
    )

    @property
    def refills(self) -> int:
        return self.max_refills

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        scores = rewards(group)
        lengths = np.array([episode.loss_mask.sum() for episode in group], np.float64)
        shaped = scores + self.overlong(lengths, context.max_tokens)
        # Standardizing a group that differs in the penalty alone would blow the penalty up.
        advantages = np.where(np.isnan(scores), np.nan, 0.0) if is_dead(scores) else standardized(shaped)
        return self.weight_tokens(group, scores, advantages, context)

    def overlong(self, lengths: np.ndarray, max_tokens: int) -> np.ndarray:
        """Return min(0, -penalty (L - (max - buffer)) / buffer) of each length (eq. 13)."""
        buffer = self.overlong_buffer * max_tokens
        if buffer == 0:
            return np.zeros(len(lengths))
        return np.minimum(0.0, -self.overlong_penalty * (lengths - (max_tokens - buffer)) / buffer)
