"""GiGPO: the turns of agents are compared with turns that follow the same observation.

Feng et al., arXiv 2505.10978.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from perilune.data.episode import Episode
from perilune.learn.advantages import Rewards, centred, is_dead, standardized, token_rewards
from perilune.learn.algorithms.base import ClippedPolicyGradient, Group, StepContext
from perilune.learn.weights import WeightedGroup, rewards


class Turn(NamedTuple):
    """A turn of an episode.

    Attributes:
        episode: index of the episode in the group.
        start, stop: the range of the turn's tokens in `token_ids`.
        observation: the prompt of the first turn, or the environment's tokens before a later turn.
        value: discounted sum of rewards from this turn on.
    """

    episode: int
    start: int
    stop: int
    observation: bytes
    value: float


class GiGPO(ClippedPolicyGradient):
    """A = A_episode + turn_weight * A_turn, for all tokens of a turn.

    A_episode is GRPO's advantage. A_turn compares the discounted return from the turn with those of all turns
    of the group that follow the same observation (the paper's anchor state). A_turn is 0 if no other turn
    follows that observation, so GiGPO equals GRPO in environments whose observations never repeat.
    """

    centred: ClassVar[bool] = False
    sparse: ClassVar[bool] = True  # the two advantages of a turn may cancel
    takes_step_rewards: ClassVar[bool] = True

    name: Literal["gigpo"] = Field("gigpo", description="name of the algorithm")
    turn_weight: float = Field(
        1.0,
        ge=0,
        description="weight of the advantages of turns, which are added to the advantages of episodes",
    )
    gamma: float = Field(0.95, gt=0, le=1, description="discount per turn, for the return of a turn")
    divide_by_std: bool = Field(
        True,
        description="divide the advantages of episodes and of turns by the standard deviation of the"
        " compared values; set false if rewards have rare outliers",
    )

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        scores = rewards(group)
        returns = scores + np.array([token_rewards(episode, 0.0).sum() for episode in group])
        normalize: Callable[[Rewards], Rewards] = standardized if self.divide_by_std else centred
        advantages = [
            np.full(len(episode.token_ids), advantage)
            for episode, advantage in zip(group, normalize(returns), strict=True)
        ]
        if not is_dead(returns):
            for turns in self.turns_by_observation(group, scores):
                values = normalize(np.array([turn.value for turn in turns]))
                for turn, advantage in zip(turns, values, strict=True):
                    advantages[turn.episode][turn.start : turn.stop] += self.turn_weight * advantage
        return self.weight_tokens(group, returns, advantages, context)

    def turns_by_observation(self, group: Group, scores: Rewards) -> list[list[Turn]]:
        """Return the turns of all scored episodes, grouped by the observation that they follow."""
        turns = defaultdict[bytes, list[Turn]](list)
        for index, (episode, score) in enumerate(zip(group, scores, strict=True)):
            if not np.isnan(score):
                for turn in self._turns(index, episode, score):
                    turns[turn.observation].append(turn)
        return list(turns.values())

    def _turns(self, index: int, episode: Episode, score: float) -> Iterator[Turn]:
        """Yield the turns of an episode, the last one first."""
        earned, value = token_rewards(episode, score), 0.0
        runs = episode.runs()
        for number, (is_own, start, stop) in reversed(list(enumerate(runs))):
            if is_own:
                observed = episode.token_ids[runs[number - 1][1] : start] if number else episode.prompt_ids
                value = float(earned[start:stop].sum()) + self.gamma * value
                yield Turn(index, start, stop, observed.tobytes(), value)
