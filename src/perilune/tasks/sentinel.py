"""The sentinel: a few sampled tokens scored again with the learner's weights, at every step.

It does so before the step is learned from, and scores one sequence at a time, apart from packing and the
log-prob kernels. When it agrees with the sampler and the learner's own log-probs of the step do not, the
fault lies between; when it does not, in the sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from perilune.data.episode import Episode
from perilune.errors import WorkFailedError
from perilune.learn.batch import PackedBatch
from perilune.learn.checks import DEFECT
from perilune.learn.trainer import Learner, token_logprobs
from perilune.models.decoder import Decoder
from perilune.models.lora import base_of, pairs_of
from perilune.tasks.publishing import ALONE, gap_limit, plain_limit, plain_logprobs
from perilune.tasks.rollouts import Groups

EPISODES = 4  # scored again at each step


@dataclass(frozen=True)
class Sentinel:
    """Compares sampler and learner at one step.

    Attributes:
        learner: that has not yet learned from the step.
        temperature: of sampling.
        step: steps done before this one.
    """

    learner: Learner
    temperature: float
    step: int

    def check_sampler(self, groups: Groups) -> None:
        """Score a few episodes of the learner's version again, one sequence at a time.

        Raises:
            WorkFailedError: when the sampler's log-probs are others, saying which difference explains them.
        """
        fresh = [one for group in groups for one in group if one.sampled and self._is_own(one)]
        stride = max(1, len(fresh) // EPISODES)
        for episode in fresh[self.step % stride :: stride][:EPISODES]:
            own = episode.logprobs[episode.loss_mask]
            gap = _gap(own, rescored(self.learner.decoder, episode, self.temperature))
            if not gap <= plain_limit(self.learner.decoder):
                raise self._differ(gap, episode, own, "sampler")

    def check_learner(self, gap: float, batches: Sequence[PackedBatch], groups: Groups) -> None:
        """Judge the gap that the learner measured over all tokens of its own version, before it updates.

        Raises:
            WorkFailedError: when it is more than rounding, saying which difference explains it.
        """
        if gap <= gap_limit(self.learner.decoder):
            return
        by_id = {one.episode_id: one for group in groups for one in group}
        worst: tuple[float, Episode | None, NDArray[np.float32]] = (-1.0, None, np.zeros(0, np.float32))
        for batch in batches:
            lengths = torch.bincount(batch.episode_of.cpu()).tolist()
            parts = torch.split(token_logprobs(self.learner.decoder, batch).cpu(), lengths)
            for name, own in zip(batch.episode_ids, parts, strict=True):
                episode = by_id[name]
                if self._is_own(episode):
                    mine = episode.logprobs[episode.loss_mask]
                    worst = max(worst, (_gap(mine, own.numpy()), episode, own.numpy()), key=_first)
        raise self._differ(gap, worst[1], worst[2], "learner")

    def _is_own(self, episode: Episode) -> bool:
        """Whether the learner's version sampled all of it; nobody sampled what others said."""
        return bool((episode.policy_version == self.learner.version)[episode.loss_mask].all())

    def _differ(
        self, gap: float, episode: Episode | None, logprobs: NDArray[np.float32], whose: str
    ) -> WorkFailedError:
        decoder = self.learner.decoder
        why = "" if episode is None else f"; {explain(episode, logprobs, decoder, self.temperature, whose)}"
        return WorkFailedError(
            f"sampler and learner differ by {gap:.3g} nats on the same weights, where"
            f" {gap_limit(decoder):g} is allowed{why}",
            where=f"step {self.step + 1}" + (f", episode {episode.episode_id}" if episode else ""),
            remedy=DEFECT,
        )


def rescored(decoder: Decoder, episode: Episode, temperature: float) -> NDArray[np.float32]:
    """float32[] log-probs of the tokens of an episode that the policy chose."""
    ids = np.concatenate([episode.prompt_ids, episode.token_ids]).astype(np.int64)
    return plain_logprobs(decoder, ids, len(episode.token_ids), temperature).cpu().numpy()[episode.loss_mask]


def explain(
    episode: Episode, logprobs: NDArray[np.float32], decoder: Decoder, temperature: float, whose: str
) -> str:
    """Which known mistake turns the right log-probs of an episode into `logprobs`, of those it chose."""
    limit = plain_limit(decoder)
    right = rescored(decoder, episode, temperature)
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


def _gap(mine: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float(np.abs(mine.astype(np.float64) - other).max()) if len(mine) else 0.0


def _first(found: tuple[Any, ...]) -> Any:
    return found[0]
