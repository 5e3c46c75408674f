"""Advantages of episodes and of tokens.

Rewards are float64[G], NaN for a failed verifier. Values per token are float64[T]. Tokens that the policy did
not sample (mask False) are skipped: they get no reward, discount nothing and are not counted.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perilune.data.episode import Episode

DEAD_STD = 1e-3
"""Rewards with a smaller standard deviation count as equal. Dividing by it would turn a trivial difference
(seven rewards of 1 and one of 0.999) into a full-size advantage."""

STD_EPSILON = 1e-4

Rewards = NDArray[np.float64]
Tokens = NDArray[np.float64]


def is_dead(rewards: Rewards) -> bool:
    """Return whether a group has nothing to compare: fewer than two scored episodes, or equal rewards."""
    return not spread(rewards) >= DEAD_STD


def spread(rewards: Rewards) -> float:
    """Return the sample standard deviation (ddof=1) of the scored episodes; 0 for fewer than two."""
    scored = rewards[~np.isnan(rewards)]
    return float(scored.std(ddof=1)) if len(scored) > 1 else 0.0


def centred(rewards: Rewards) -> Rewards:
    """Return r - mean; 0 in a dead group."""
    if is_dead(rewards):
        return np.where(np.isnan(rewards), np.nan, 0.0)
    return np.asarray(rewards - np.nanmean(rewards))


def standardized(rewards: Rewards, epsilon: float = STD_EPSILON) -> Rewards:
    """Return (r - mean) / (std + epsilon), std with ddof=1 as in verl and TRL."""
    return np.asarray(centred(rewards) / (spread(rewards) + epsilon))


def leave_one_out(rewards: Rewards) -> Rewards:
    """Return r - mean of the others' rewards, which is K / (K - 1) (r - mean) (RLOO, arXiv 2402.14740)."""
    scored = int((~np.isnan(rewards)).sum())
    return np.asarray(centred(rewards) * (scored / max(scored - 1, 1)))


def whitened(values: Sequence[Tokens], masks: Sequence[NDArray[np.bool_]]) -> list[Tokens]:
    """Return (x - mean) / std over all unmasked tokens of all episodes; 0 if all values are equal.

    Long episodes influence mean and std more than short ones, because each token counts once.
    """
    everything = np.concatenate([np.zeros(0), *(v[m] for v, m in zip(values, masks, strict=True))])
    std = spread(everything)
    if std < DEAD_STD:
        return [np.zeros(len(value)) for value in values]
    mean = everything.mean()
    return [np.where(mask, (v - mean) / std, 0.0) for v, mask in zip(values, masks, strict=True)]


def token_rewards(episode: Episode, reward: float) -> Tokens:
    """Return float64[T]: the process rewards, if any, plus `reward` at the last sampled token."""
    values = np.zeros(len(episode.token_ids))
    if episode.step_rewards is not None:
        rewarded = episode.loss_mask & ~np.isnan(episode.step_rewards)
        values[rewarded] = episode.step_rewards[rewarded]
    if episode.loss_mask.any():
        values[np.flatnonzero(episode.loss_mask)[-1]] += reward
    return values


def rewards_to_go(rewards: Tokens, mask: NDArray[np.bool_], gamma: float) -> Tokens:
    """Return G_t = r_t + gamma G_{t+1} over unmasked tokens; 0 at masked tokens."""
    returns = np.zeros(len(rewards))
    later = 0.0
    for t in np.flatnonzero(mask)[::-1]:
        later = returns[t] = rewards[t] + gamma * later
    return returns


def generalized_advantages(
    rewards: Tokens, values: Tokens, mask: NDArray[np.bool_], *, gamma: float, lam: float, after: float = 0.0
) -> Tokens:
    """Compute GAE (arXiv 1506.02438): A_t = d_t + gamma lam A_{t+1}, d_t = r_t + gamma V_{t+1} - V_t.

    Only unmasked tokens count. V_t is the value of the state before token t, `after` that of the last state.
    """
    advantages = np.zeros(len(rewards))
    advantage, value = 0.0, after
    for t in np.flatnonzero(mask)[::-1]:
        advantage = advantages[t] = rewards[t] + gamma * value - values[t] + gamma * lam * advantage
        value = values[t]
    return advantages
