"""The log-prob checker: some sampled tokens are scored again with the learner's weights at every step.

It does so before the step is learned from, one sequence at a time, apart from packing and the log-prob
kernels. When it agrees with the sampler and the learner's own log-probs of the step do not, the fault lies
between; when it does not, in the sampler. With the same probabilities it draws the tokens again: they follow
from the seed, so that a sampler which left some of the vocabulary out is found by its choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from perilune.data.episode import Episode
from perilune.engine.random import uniforms
from perilune.errors import REPORT_BUG, WorkFailedError
from perilune.learn.batch import PackedBatch
from perilune.learn.trainer import Learner, token_logprobs
from perilune.models.adapters.lora import base_of, pairs_of
from perilune.models.decoder import Decoder
from perilune.rollout.groups import Groups
from perilune.tasks.stage.publishing import (
    ALONE,
    RANDOM,
    gap_limit,
    is_random,
    plain_distributions,
    plain_limit,
)

EPISODES = 4  # scored again at each step
DRAWN = 16  # tokens of each that are drawn again

Array = NDArray[np.float32]


@dataclass(frozen=True)
class LogprobChecker:
    """Compares sampler, learner and reference on the tokens of a step.

    Attributes:
        learner: that has not yet learned from the step.
        temperature: of sampling.
        draws_are_known: whether the first turn of an episode has the random numbers of its place in the step:
            where one player alone samples.
    """

    learner: Learner
    temperature: float
    draws_are_known: bool = False

    def check_sampler(self, groups: Groups, step: int) -> None:
        """Score a few episodes of the learner's version again, one sequence at a time.

        Args:
            step: steps done before this one.

        Raises:
            WorkFailedError: when the sampler's log-probs are others, saying which difference explains them;
                when its tokens are not the ones to be drawn.
        """
        fresh = [one for group in groups for one in group if one.sampled and self._is_own(one)]
        stride = max(1, len(fresh) // EPISODES)
        for episode in fresh[step % stride :: stride][:EPISODES]:
            right, first = _scored(self.learner.decoder, episode, self.temperature)
            gap = _gap(episode.logprobs[episode.loss_mask], right)
            if not gap <= plain_limit(self.learner.decoder):
                raise self._differ(gap, episode, episode.logprobs[episode.loss_mask], "sampler", step)
            if self.draws_are_known:
                self._check_draws(episode, first)

    def _check_draws(self, episode: Episode, distributions: Array) -> None:
        """The first tokens are where the random numbers of their places fall in float32[N, V]."""
        count = min(len(distributions), int(np.argmin(np.append(episode.loss_mask, False))))
        step, index, sample = (int(part) for part in episode.episode_id.split("/"))
        sums = np.exp(distributions[:count].astype(np.float64)).cumsum(1)
        rows, tokens = np.arange(count), episode.token_ids[:count]
        above = sums[rows, tokens] / sums[:, -1]
        below = np.where(tokens > 0, sums[rows, tokens - 1], 0) / sums[:, -1]
        slack = plain_limit(self.learner.decoder)

        def misses(step: int) -> NDArray[np.int64]:
            key = np.array([[episode.seed, step, index, sample]], np.uint64)
            wanted = uniforms(key, np.arange(count)[None])[0]
            return np.flatnonzero((wanted < below - slack) | (wanted > above + slack))

        missed = misses(step)
        if not len(missed):
            return
        other = next((old for old in range(step - 1, max(0, step - 9), -1) if not len(misses(old))), None)
        why = (
            "it sampled from another distribution than its log-probs say (top-p, top-k, another temperature?)"
        )
        if other is not None:
            why = f"it drew them with the random numbers of step {other}"
        raise WorkFailedError(
            f"the sampler chose {len(missed)} of {count} tokens that its random numbers do not give: {why}",
            where=f"step {step}, episode {episode.episode_id}",
            remedy=REPORT_BUG,
        )

    def check_reference(
        self, batches: Sequence[PackedBatch], reference: Decoder, groups: Groups, step: int
    ) -> None:
        """Score an episode again with the policy that training began with.

        Args:
            batches: with the log-probs that the KL is taken to.

        Raises:
            WorkFailedError: when these are others, saying whose they are.
        """
        found = [
            (batch, batch.reference_logprobs) for batch in batches if batch.reference_logprobs is not None
        ]
        if not found:
            return
        batch, logprobs = found[step % len(found)]
        by_id = {one.episode_id: one for group in groups for one in group}
        its = [*_by_episode(batch, logprobs, by_id)]
        episode, mine = its[step % len(its)]
        right = rescored(reference, episode, self.temperature)
        limit = plain_limit(reference)
        gap = _gap(mine, right)
        if gap <= limit:
            return
        whose = {
            "at temperature 1": rescored(reference, episode, 1.0),
            "the sampler's": episode.logprobs[episode.loss_mask],
            "the learner's": rescored(self.learner.decoder, episode, self.temperature),
        }
        told = next((f": they are {name}" for name, other in whose.items() if _gap(mine, other) <= limit), "")
        raise WorkFailedError(
            f"the log-probs of the reference policy, to which the KL is taken, differ by {gap:.3g} nats from"
            f" the reference's own{told}",
            where=f"step {step + 1}, episode {episode.episode_id}",
            remedy=REPORT_BUG,
        )

    def check_learner(
        self, figures: Mapping[str, float], batches: Sequence[PackedBatch], groups: Groups, step: int
    ) -> None:
        """Judge what the learner measured over all tokens, before it updates.

        Raises:
            WorkFailedError: when the gap on tokens of its own version is more than rounding, saying which
                difference explains it; when there is a KL to the reference before the first update.
        """
        limit = gap_limit(self.learner.decoder)
        kl, gap = figures.get("kl_reference", 0.0), figures.get("logprob_gap_max", 0.0)
        if self.learner.version == 0 and not abs(kl) <= limit:
            raise WorkFailedError(
                f"kl_reference is {kl:.3g} nats a token before the first update, where policy and reference"
                f" are one, and at most {limit:g} is rounding",
                where=f"step {step + 1}",
                remedy=REPORT_BUG,
            )
        if gap <= limit:
            return
        by_id = {one.episode_id: one for group in groups for one in group}
        gaps = [
            (_gap(one.logprobs[one.loss_mask], own), one, own)
            for batch in batches
            for one, own in _by_episode(batch, token_logprobs(self.learner.decoder, batch), by_id)
            if self._is_own(one)
        ]
        again, worst, logprobs = max(gaps, key=lambda found: found[0])
        if again <= limit:
            raise WorkFailedError(
                f"the learner's log-probs with a gradient differ by {gap:.3g} nats from the sampler's and"
                f" from its own without one: {RANDOM}",
                where=f"step {step + 1}",
                remedy=REPORT_BUG,
            )
        raise self._differ(gap, worst, logprobs, "learner", step)

    def _is_own(self, episode: Episode) -> bool:
        """Whether the learner's version sampled all of it; nobody sampled what others said."""
        return bool((episode.policy_version == self.learner.version)[episode.loss_mask].all())

    def _differ(
        self, gap: float, episode: Episode, logprobs: Array, whose: str, step: int
    ) -> WorkFailedError:
        decoder = self.learner.decoder
        why = explain(episode, logprobs, decoder, self.temperature, whose)
        return WorkFailedError(
            f"sampler and learner differ by {gap:.3g} nats on the same weights, where"
            f" {gap_limit(decoder):g} is allowed; {why}",
            where=f"step {step + 1}, episode {episode.episode_id}",
            remedy=REPORT_BUG,
        )


def _by_episode(
    batch: PackedBatch, values: torch.Tensor, by_id: dict[str, Episode]
) -> Iterator[tuple[Episode, Array]]:
    """Each episode of a micro-batch with its part of float32[M]."""
    lengths = torch.bincount(batch.episode_of.cpu()).tolist()
    for name, part in zip(batch.episode_ids, torch.split(values.cpu(), lengths), strict=True):
        yield by_id[name], part.numpy()


def rescored(decoder: Decoder, episode: Episode, temperature: float) -> Array:
    """float32[] log-probs of the tokens of an episode that the policy chose."""
    return _scored(decoder, episode, temperature)[0]


def _scored(decoder: Decoder, episode: Episode, temperature: float) -> tuple[Array, Array]:
    """The same, and float32[N, V] of the whole vocabulary at the first few tokens."""
    ids = np.concatenate([episode.prompt_ids, episode.token_ids]).astype(np.int64)
    every = plain_distributions(decoder, ids, len(episode.token_ids), temperature)
    chosen = every.gather(1, torch.from_numpy(ids)[-len(every) :, None].to(every.device))[:, 0]
    return chosen.cpu().numpy()[episode.loss_mask], every[:DRAWN].cpu().numpy()


def explain(episode: Episode, logprobs: Array, decoder: Decoder, temperature: float, whose: str) -> str:
    """Which known mistake turns the right log-probs of an episode into `logprobs`, of those it chose."""
    limit = plain_limit(decoder)
    right = rescored(decoder, episode, temperature)
    if is_random(decoder, np.concatenate([episode.prompt_ids, episode.token_ids]).astype(np.int64)):
        return f"the learner's forward pass gives other values each time: {RANDOM}"
    if _gap(logprobs, right) <= limit:
        return f"the {whose}'s are right, so the other's are not{_of_the_base(episode, decoder, temperature)}"
    if _gap(logprobs, rescored(decoder, episode, 1.0)) <= limit:
        return f"the temperature {temperature:g} is missing from the {whose}'s log-probs"
    if _gap(logprobs, rescored(decoder, episode, temperature**2)) <= limit:
        return f"the temperature {temperature:g} is twice in the {whose}'s log-probs"
    if len(right) > 1 and min(_gap(logprobs[1:], right[:-1]), _gap(logprobs[:-1], right[1:])) <= limit:
        return f"the {whose}'s log-probs are off by one token"
    told = _of_the_base(episode, decoder, temperature)
    return f"temperature and places are right, so the {whose} has other weights, tokens or arithmetic{told}"


def _of_the_base(episode: Episode, decoder: Decoder, temperature: float) -> str:
    """Says so where the sampler computed without the learner's adapter."""
    if not pairs_of(decoder):
        return ""
    gap = _gap(episode.logprobs[episode.loss_mask], rescored(base_of(decoder), episode, temperature))
    return f"; it sampled with the base {ALONE}" if gap <= gap_limit(decoder) else ""


def _gap(mine: Array, other: Array) -> float:
    return float(np.abs(mine.astype(np.float64) - other).max()) if len(mine) else 0.0
