"""What each token of a group contributes to the loss: weights, with the share of the denominator they bring.

A loss component is  L = sum over tokens of weight * token_loss / sum over groups of denominator.  Both sums
run over the whole batch of one optimizer step, so L does not depend on how the batch is cut or ordered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
        denominator: what this group adds to the component's denominator (tokens or sequences).
    """

    weights: tuple[NDArray[np.float32], ...]
    denominator: float


@dataclass(frozen=True, slots=True, eq=False)
class GroupWeights:
    """What an algorithm makes of a group.

    Attributes:
        episodes: the group, failures included (their weights are zero).
        policy_gradient: signed, advantage included: token loss is -min(ratio * w, clipped ratio * w).
        cross_entropy: token loss is -w * log-prob.
        reference_kl: coefficient included: token loss is w * k3(policy, reference).
        advantages: float32[G] for the reader, NaN for a failed episode; None when nothing is compared.
        dead: the rewards do not differ, so the group teaches nothing.
    """

    episodes: tuple[Episode, ...]
    policy_gradient: Component | None = None
    cross_entropy: Component | None = None
    reference_kl: Component | None = None
    advantages: NDArray[np.float32] | None = None
    dead: bool = False


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


def aggregate(
    group: Sequence[Episode],
    scale: Sequence[float] | NDArray[np.float64],
    mode: Aggregation,
    *,
    constant: int | None = None,
) -> Component:
    """Spread one number an episode over its tokens, so that the batch loss is the named mean.

    Episodes whose scale is NaN (failures) are not there: no weight, no share of the denominator. Tokens the
    policy did not choose (loss_mask False) carry nothing and count for nothing.

    | mode                    | batch loss                             |
    |-------------------------|----------------------------------------|
    | token-mean              | sum of token losses / number of tokens |
    | seq-mean-token-mean     | mean over episodes of their token mean |
    | seq-mean-token-sum      | mean over episodes of their token sum  |
    | seq-mean-token-sum-norm | previous / `constant`                  |

    Args:
        scale: [G], the factor of every token of an episode (its advantage, a coefficient, or 1).
        constant: the fixed length of seq-mean-token-sum-norm. Never taken from the batch: a constant that
            follows the padded width changes the learning rate at every step (Dr. GRPO, arXiv 2503.20783).

    Raises:
        ValueError: when the mode needs a positive `constant` and has none, or the reverse.
    """
    if (mode == "seq-mean-token-sum-norm") != (constant is not None and constant > 0):
        raise ValueError(f"{mode} with constant {constant}")
    weights, denominator = [], 0.0
    for episode, value in zip(group, scale, strict=True):
        mask = episode.loss_mask
        if math.isnan(value):
            weights.append(np.zeros(len(mask), np.float32))
            continue
        length = int(mask.sum())
        share = max(length, 1) if mode == "seq-mean-token-mean" else constant or 1
        weights.append(np.where(mask, np.float32(value / share), np.float32(0)))
        denominator += length if mode == "token-mean" else 1.0
    return Component(tuple(weights), denominator)
