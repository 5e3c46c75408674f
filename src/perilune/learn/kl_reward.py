"""The KL to the reference as part of the reward, as in RLHF, instead of as a loss.

The estimate is k1 = log pi - log pi_ref of the sampled tokens, with pi the policy that sampled them.
Algorithms with token-level rewards subtract `kl` times k1 from the reward of each token (Ouyang et al., arXiv
2203.02155). Algorithms that compare whole answers subtract the sum over the answer (RLOO, arXiv 2402.14740).
The KL carries no gradient.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from perilune.data.episode import Episode
from perilune.learn.algorithms.base import Algorithm, Group, StepContext
from perilune.learn.weights import WeightedGroup


def weight_groups(algorithm: Algorithm, groups: Sequence[Group], context: StepContext) -> list[WeightedGroup]:
    """Compute token weights; with `kl_estimator` k1_reward, first subtract the KL from the rewards.

    The returned groups have the original rewards, and with k1_reward the figure `kl_reference`: the mean of
    k3 over the tokens of the group.

    Raises:
        ValueError: when the context lacks the reference_logprobs that k1_reward needs.
    """
    if not context.kl or context.kl_estimator != "k1_reward":
        return algorithm.weight_groups(groups, context)
    penalized = [[_penalize(e, algorithm.takes_step_rewards, context) for e in group] for group in groups]
    return [
        replace(
            weighted,
            episodes=tuple(group),
            figures={**weighted.figures, "kl_reference": _mean_k3(group, context)},
        )
        for group, weighted in zip(groups, algorithm.weight_groups(penalized, context), strict=True)
    ]


def _k1(episode: Episode, context: StepContext) -> np.ndarray:
    """Return k1 as float64[T], 0 at tokens that the policy did not sample."""
    reference = context.signal("reference_logprobs", episode)
    return np.where(episode.loss_mask, episode.logprobs - reference, 0.0)


def _penalize(episode: Episode, per_token: bool, context: StepContext) -> Episode:
    if episode.failure or episode.reward is None:
        return episode
    cost = context.kl * _k1(episode, context)
    if not per_token:
        return replace(episode, reward=episode.reward - float(cost.sum()))
    rewards = np.zeros(len(cost)) if episode.step_rewards is None else np.nan_to_num(episode.step_rewards)
    return replace(episode, step_rewards=(rewards - cost).astype(np.float32))


def _mean_k3(group: Group, context: StepContext) -> float:
    x = np.concatenate([_k1(e, context)[e.loss_mask] for e in group if not e.failure] or [np.zeros(0)])
    return float((np.expm1(-x) + x).mean()) if len(x) else 0.0
