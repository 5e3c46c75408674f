"""What must hold of every step's weights and micro-batches, whatever the algorithm; checked at every step.

Both checks count again, from the episodes, what the code they watch has counted: they cost a few passes over
numpy arrays and no forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perilune.data.episode import Episode
from perilune.errors import REPORT_BUG, WorkFailedError
from perilune.learn.batch import COMPONENTS, PackedBatch
from perilune.learn.weights import Component, ValueTargets, WeightedGroup

TOLERANCE = 1e-3  # of sums in float32, relative to the sum of magnitudes
SMALL = 1e-4  # below this an advantage has no sign worth checking
REACH = 0.5  # least share of an episode's learned tokens that its advantage must reach


def check_weights(groups: Sequence[WeightedGroup], *, centred: bool, sparse: bool = False) -> None:
    """Check what an algorithm made of the groups of a step.

    Args:
        centred: whether the advantages of a group must add up to zero.
        sparse: whether an advantage may leave out most tokens of its episode.

    Raises:
        WorkFailedError: naming the group or the episode, when a weight is not finite, falls on a token the
            policy did not choose, contradicts its episode's advantage or reaches few of its tokens; when
            there is not one weight a token; when advantages do not add up.
    """
    for group in groups:
        for name, component in _components(group):
            _check_component(group, name, component)
        if group.advantages is None:
            continue
        advantages = group.advantages.astype(np.float64)
        if len(advantages) != len(group.episodes):
            raise _wrong(group, f"has {len(advantages)} advantages for {len(group.episodes)} episodes")
        total, size = float(np.nansum(advantages)), float(np.nansum(np.abs(advantages)))
        if centred and abs(total) > TOLERANCE * max(size, 1.0):
            raise _wrong(group, f"has advantages that add up to {total:.3g}, not to 0")
        if group.policy_gradient is not None:
            for episode, advantage, weights in zip(
                group.episodes, advantages.tolist(), group.policy_gradient.weights, strict=True
            ):
                _check_advantage(episode, advantage, weights, 0.0 if sparse else REACH)


def check_packed(groups: Sequence[WeightedGroup], batches: Sequence[PackedBatch]) -> None:
    """Check that micro-batches say what the groups of their step say, and nothing twice.

    Raises:
        WorkFailedError: when a learned token is not the episode's, or is not predicted by the token before
            it; when log-probs or versions are another token's; when weights do not add up to the groups'
            over the denominator of the whole step.
    """
    expected = {
        episode.episode_id: episode for group in groups for episode in _taught(group)
    }  # whose order does not matter
    seen: set[str] = set()
    for batch in batches:
        _check_tokens(batch, [expected[name] for name in batch.episode_ids])
        twice = seen & {*batch.episode_ids}
        if twice:
            raise WorkFailedError(f"episode {min(twice)} is learned from twice in a step", remedy=REPORT_BUG)
        seen |= {*batch.episode_ids}
    missing = expected.keys() - seen
    if missing:
        raise WorkFailedError(f"episode {min(missing)} has weights and was not packed", remedy=REPORT_BUG)
    for name in COMPONENTS:
        components = [found for group in groups for its, found in _components(group) if its == name]
        denominator = math.fsum(component.denominator for component in components)
        every = [w.astype(np.float64) for component in components for w in component.weights]
        packed = [
            weights.detach().cpu().double() for b in batches if (weights := getattr(b, name)) is not None
        ]
        size = math.fsum(float(np.abs(w).sum()) for w in every) / (denominator or 1.0)
        sums = (
            ("weights", math.fsum(float(w.sum()) for w in every) / (denominator or 1.0),
             math.fsum(float(w.sum()) for w in packed)),
            ("magnitudes", size, math.fsum(float(w.abs().sum()) for w in packed)),
        )  # fmt: skip
        for what, right, found in sums:
            if abs(found - right) > TOLERANCE * size:
                raise WorkFailedError(
                    f"the {name} {what} of {len(batches)} micro-batches add up to {found:.6g}, and those of"
                    f" the step to {right:.6g}: a denominator is not the whole step's",
                    remedy=REPORT_BUG,
                )


def _components(group: WeightedGroup) -> Iterator[tuple[str, Component]]:
    for name in COMPONENTS:
        found: Component | ValueTargets | None = getattr(group, name)
        if found is not None:
            yield name, found.component if isinstance(found, ValueTargets) else found


def _taught(group: WeightedGroup) -> Iterator[Episode]:
    """Episodes of which any token carries weight."""
    for index, episode in enumerate(group.episodes):
        if any(component.weights[index].any() for _, component in _components(group)):
            yield episode


def _check_component(group: WeightedGroup, name: str, component: Component) -> None:
    if len(component.weights) != len(group.episodes) or len(component.counts) != len(group.episodes):
        raise _wrong(group, f"has {name} weights for {len(component.weights)} of {len(group.episodes)}")
    for episode, weights, count in zip(group.episodes, component.weights, component.counts, strict=True):
        if weights.shape != episode.loss_mask.shape:
            raise _odd(episode, f"has {len(weights)} {name} weights for {len(episode.loss_mask)} tokens")
        if not (np.isfinite(weights).all() and 0 <= count < math.inf):
            raise _odd(episode, f"has {name} weights that are not finite")
        if weights[~episode.loss_mask].any():
            raise _odd(episode, f"has {name} weight on tokens that the loss mask leaves out")
        if weights.any() and not count:
            raise _odd(episode, f"has {name} weight and no share of the denominator")


def _check_advantage(episode: Episode, advantage: float, weights: NDArray[np.float32], reach: float) -> None:
    """An episode's weights and its advantage have one sign, and that share of its tokens is reached."""
    if math.isnan(advantage):
        if weights.any():
            raise _odd(episode, "was not judged and has weight")
        return
    if abs(advantage) < SMALL or (episode.truncated and not weights.any()):
        return
    total = float(weights.sum(dtype=np.float64))
    if total * advantage <= 0:
        raise _odd(
            episode,
            f"has advantage {advantage:.3g} and policy-gradient weights that add up to {total:.3g}:"
            " mask and advantages are mixed up",
        )
    reached, tokens = int(np.count_nonzero(weights)), int(episode.loss_mask.sum())
    if reached < reach * tokens:
        raise _odd(episode, f"has an advantage that reaches {reached} of its {tokens} tokens")


def _check_tokens(batch: PackedBatch, episodes: Sequence[Episode]) -> None:
    """Targets, the tokens that predict them, and the figures that go with them, episode by episode."""
    fed, rows = batch.token_ids.cpu().numpy(), batch.rows.cpu().numpy()
    positions = batch.positions.cpu().numpy()
    found = {
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
        right: tuple[NDArray[Any], ...] = (
            episode.token_ids[mask],
            sequence[before:-1][mask],
            before + np.flatnonzero(mask),
            episode.logprobs[mask],
            episode.policy_version[mask],
        )
        for (what, values), theirs in zip(found.items(), right, strict=True):
            if not np.array_equal(values[start : start + length], theirs):
                raise _odd(episode, f"was packed with wrong {what}")
        start += length
    if start != len(rows):
        raise WorkFailedError(
            f"{len(rows)} tokens are learned from, and the loss masks have {start}", remedy=REPORT_BUG
        )


def _odd(episode: Episode, what: str) -> WorkFailedError:
    return WorkFailedError(f"episode {episode.episode_id} {what}", remedy=REPORT_BUG)


def _wrong(group: WeightedGroup, what: str) -> WorkFailedError:
    name = group.episodes[0].group_id if group.episodes else ""
    return WorkFailedError(f"group {name} {what}", remedy=REPORT_BUG)
