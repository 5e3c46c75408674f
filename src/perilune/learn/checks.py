"""Invariants of the weights and micro-batches of every step, for all algorithms.

Both checks recompute their figures from the episodes, independently of the code that they check. They take a
few passes over numpy arrays, and no forward pass of the model.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perilune.data.episode import Episode
from perilune.errors import REPORT_BUG, WorkFailedError
from perilune.learn.batch import PackedBatch
from perilune.learn.weights import COMPONENTS, Component, WeightedGroup

TOLERANCE = 1e-3  # error of float32 sums, relative to the sum of magnitudes
MIN_CHECKED_ADVANTAGE = 1e-4  # the sign of a smaller advantage is not checked
MIN_TOKEN_SHARE = 0.5  # smallest share of an episode's sampled tokens that must have a weight


def check_weights(groups: Sequence[WeightedGroup], *, centred: bool, sparse: bool = False) -> None:
    """Check the weights that an algorithm computed for the groups of a step.

    Args:
        centred: whether the advantages of a group must add up to 0.
        sparse: whether an advantage may leave out most tokens of its episode.

    Raises:
        WorkFailedError: naming the group or the episode, when there is not one finite weight per token; when
            a weight is on a token that the policy did not sample; when the weights contradict the episode's
            advantage or reach few of its tokens; when the advantages of a group do not add up to 0.
    """
    for group in groups:
        for name, component in group.components.items():
            _check_component(group, name, component)
        if group.advantages is None:
            continue
        advantages = group.advantages.astype(np.float64)
        if len(advantages) != len(group.episodes):
            raise _bad_group(group, f"has {len(advantages)} advantages for {len(group.episodes)} episodes")
        total, size = float(np.nansum(advantages)), float(np.nansum(np.abs(advantages)))
        if centred and abs(total) > TOLERANCE * max(size, 1.0):
            raise _bad_group(group, f"has advantages that add up to {total:.3g}, not to 0")
        if group.policy_gradient is not None:
            for episode, advantage, weights in zip(
                group.episodes, advantages.tolist(), group.policy_gradient.weights, strict=True
            ):
                _check_advantage(episode, advantage, weights, 0.0 if sparse else MIN_TOKEN_SHARE)


def check_packed(groups: Sequence[WeightedGroup], batches: Sequence[PackedBatch]) -> None:
    """Check that micro-batches contain every learned token of their groups exactly once.

    Raises:
        WorkFailedError: when a learned token, its predicting token, its log-prob or its policy version is not
            that of the episode; when the weights do not add up to those of the groups divided by the
            denominator of the whole step.
    """
    expected = {episode.episode_id: episode for group in groups for episode in _weighted_episodes(group)}
    learned_ids: set[str] = set()
    for batch in batches:
        _check_tokens(batch, [expected[name] for name in batch.episode_ids])
        twice = learned_ids & {*batch.episode_ids}
        if twice:
            raise WorkFailedError(f"a step learns twice from episode {min(twice)}", remedy=REPORT_BUG)
        learned_ids |= {*batch.episode_ids}
    missing = expected.keys() - learned_ids
    if missing:
        raise WorkFailedError(
            f"episode {min(missing)} has weights and is in no micro-batch", remedy=REPORT_BUG
        )
    for name in COMPONENTS:
        components = [group.components[name] for group in groups if name in group.components]
        denominator = math.fsum(component.denominator for component in components)
        arrays = [w.astype(np.float64) for component in components for w in component.weights]
        packed = [
            weights.detach().cpu().double() for b in batches if (weights := getattr(b, name)) is not None
        ]
        size = math.fsum(float(np.abs(w).sum()) for w in arrays) / (denominator or 1.0)
        total = math.fsum(float(w.sum()) for w in arrays) / (denominator or 1.0)
        sums = (
            ("weights", total, math.fsum(float(w.sum()) for w in packed)),
            ("magnitudes", size, math.fsum(float(w.abs().sum()) for w in packed)),
        )
        for what, right, actual in sums:
            if abs(actual - right) > TOLERANCE * size:
                raise WorkFailedError(
                    f"the {name} {what} of {len(batches)} micro-batches add up to {actual:.6g}, those of the"
                    f" step to {right:.6g}: a denominator is not that of the whole step",
                    remedy=REPORT_BUG,
                )


def _weighted_episodes(group: WeightedGroup) -> Iterator[Episode]:
    """Iterate over the episodes with a weight on any token."""
    for index, episode in enumerate(group.episodes):
        if any(component.weights[index].any() for component in group.components.values()):
            yield episode


def _check_component(group: WeightedGroup, name: str, component: Component) -> None:
    if len(component.weights) != len(group.episodes) or len(component.counts) != len(group.episodes):
        raise _bad_group(
            group, f"has {name} weights for {len(component.weights)} of {len(group.episodes)} episodes"
        )
    for episode, weights, count in zip(group.episodes, component.weights, component.counts, strict=True):
        if weights.shape != episode.loss_mask.shape:
            raise _bad_episode(
                episode, f"has {len(weights)} {name} weights for {len(episode.loss_mask)} tokens"
            )
        if not (np.isfinite(weights).all() and 0 <= count < math.inf):
            raise _bad_episode(episode, f"has {name} weights that are not finite")
        if weights[~episode.loss_mask].any():
            raise _bad_episode(episode, f"has {name} weight on masked tokens")
        if weights.any() and not count:
            raise _bad_episode(episode, f"has {name} weight and no share of the denominator")


def _check_advantage(episode: Episode, advantage: float, weights: NDArray[np.float32], reach: float) -> None:
    """Check that weights have the sign of the advantage, and that the share `reach` of tokens has one."""
    if math.isnan(advantage):
        if weights.any():
            raise _bad_episode(episode, "has no verdict but has weights")
        return
    is_unlearned = not episode.loss_mask.any() or (episode.truncated and not weights.any())
    if is_unlearned or abs(advantage) < MIN_CHECKED_ADVANTAGE:
        return
    total = float(weights.sum(dtype=np.float64))
    if total * advantage <= 0:
        raise _bad_episode(
            episode,
            f"has advantage {advantage:.3g} and policy-gradient weights that add up to {total:.3g}:"
            " the mask or the advantages are mixed up",
        )
    reached, tokens = int(np.count_nonzero(weights)), int(episode.loss_mask.sum())
    if reached < reach * tokens:
        raise _bad_episode(episode, f"has an advantage that reaches {reached} of its {tokens} tokens")


def _check_tokens(batch: PackedBatch, episodes: Sequence[Episode]) -> None:
    """Check targets, their predicting tokens, log-probs and versions, episode by episode."""
    fed, rows = batch.token_ids.cpu().numpy(), batch.rows.cpu().numpy()
    positions = batch.positions.cpu().numpy()
    packed = {
        "learned tokens": batch.targets.cpu().numpy(),
        "tokens before the learned ones (the mask is off by one)": fed[rows],
        "positions of the tokens before the learned ones": positions[rows],
        "log-probs of the sampler": batch.sampler_logprobs.cpu().numpy(),
        "policy versions": batch.policy_version.cpu().numpy(),
    }
    start = 0
    for episode in episodes:
        mask, before = episode.loss_mask, len(episode.prompt_ids) - 1
        sequence = np.concatenate([episode.prompt_ids, episode.token_ids])
        length = int(mask.sum())
        expected: tuple[NDArray[Any], ...] = (
            episode.token_ids[mask],
            sequence[before:-1][mask],
            before + np.flatnonzero(mask),
            episode.logprobs[mask],
            episode.policy_version[mask],
        )
        for (what, values), right in zip(packed.items(), expected, strict=True):
            if not np.array_equal(values[start : start + length], right):
                raise _bad_episode(episode, f"was packed with wrong {what}")
        start += length
    if start != len(rows):
        raise WorkFailedError(
            f"the micro-batch learns {len(rows)} tokens, but the loss masks have {start}", remedy=REPORT_BUG
        )


def _bad_episode(episode: Episode, what: str) -> WorkFailedError:
    return WorkFailedError(f"episode {episode.episode_id} {what}", remedy=REPORT_BUG)


def _bad_group(group: WeightedGroup, what: str) -> WorkFailedError:
    name = group.episodes[0].group_id if group.episodes else ""
    return WorkFailedError(f"group {name} {what}", remedy=REPORT_BUG)
