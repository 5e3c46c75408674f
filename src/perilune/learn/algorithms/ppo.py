"""PPO with a critic: each token's return is compared with the value of its state.

Schulman et al., arXiv 1707.06347 and 1506.02438. The critic (`learn.critic`) reads the value from the
decoder's hidden state. Advantages are computed by GAE and whitened over the batch; the critic's targets are
the returns before whitening. If all rewards of a batch are equal, the advantages are only errors of the
critic, which whitening enlarges. All groups of such a batch count as dead.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from perilune.learn.advantages import generalized_advantages, is_dead, token_rewards, whitened
from perilune.learn.algorithms.base import ClippedPolicyGradient, Group, Signal, StepContext
from perilune.learn.weights import ValueTargets, WeightedGroup, rewards


class PPO(ClippedPolicyGradient):
    """A by GAE, whitened over the batch's tokens. The critic's target is A + V."""

    compares: ClassVar[Literal["group", "batch", "nothing"]] = "nothing"
    takes_step_rewards: ClassVar[bool] = True

    name: Literal["ppo"] = Field("ppo", description="name of the algorithm")
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")
    lam: float = Field(
        0.95, ge=0, le=1, description="lambda of GAE: 1 uses rewards alone, 0 relies on the critic"
    )
    value_clip: float = Field(0.2, gt=0, description="clip range of the critic's predictions within a step")
    value_weight: float = Field(0.5, gt=0, description="coefficient of the critic's loss")
    critic_lr: float | None = Field(
        None,
        gt=0,
        le=10,
        description="peak learning rate of the critic's layer; by default the stage's lr",
    )
    bootstrap_truncated: bool = Field(
        False,
        description="true: the return of a truncated answer continues with the critic's value of its last"
        " state; false: it ends there",
    )

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({"values", "values_after"} if self.bootstrap_truncated else {"values"})

    @property
    def least_samples(self) -> int:
        return 1

    def weight_groups(self, groups: Sequence[Group], context: StepContext) -> list[WeightedGroup]:
        scores = [rewards(group) for group in groups]
        episodes = [episode for group in groups for episode in group]
        masks = [e.loss_mask & (not e.failure) for e in episodes]
        values = [context.signal("values", episode) for episode in episodes]
        raw = []
        for e, v, m in zip(episodes, values, masks, strict=True):
            earned, after = token_rewards(e, e.reward or 0.0), context.value_after(e)
            raw.append(generalized_advantages(earned, v, m, gamma=self.gamma, lam=self.lam, after=after))
        advantages = whitened(raw, masks)
        batch = np.concatenate([np.empty(0), *scores])
        dead = (
            is_dead(batch)
            and np.isfinite(batch).sum() > 1
            and all(episode.step_rewards is None for episode in episodes)
        )
        weighted: list[WeightedGroup] = []
        start = 0
        for group, group_scores in zip(groups, scores, strict=True):
            own = slice(start, start := start + len(group))
            weight = np.where(self.learned(group, group_scores), self.value_weight, np.nan)
            targets = ValueTargets(
                self.component(group, weight, context),
                returns=tuple((a + v).astype(np.float32) for a, v in zip(raw[own], values[own], strict=True)),
                values=tuple(v.astype(np.float32) for v in values[own]),
                clip=self.value_clip,
            )
            without_value = self.weight_tokens(group, group_scores, advantages[own], context, dead=dead)
            weighted.append(replace(without_value, value=targets))
        return weighted
