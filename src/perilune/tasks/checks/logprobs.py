"""The log-prob checker: at every step it rescores some sampled tokens with the learner's weights.

It rescores them before the step's updates, one sequence at a time, without packing or the log-prob kernels.
If the sampler's log-probs differ from these, the sampler is wrong; if only the learner's differ, the learner
is. The checker also draws the tokens again from these probabilities. The seed determines the random numbers,
so a sampler that ignores part of the vocabulary draws other tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perilune.data.episode import Episode
from perilune.engine.random import uniforms
from perilune.errors import REPORT_BUG, WorkFailedError
from perilune.learn.batch import PackedBatch
from perilune.learn.replay import RouteReplay, pack_routes
from perilune.learn.trainer import Learner, token_logprobs
from perilune.metrics.rounding import Rounding
from perilune.models.adapters.lora import adapter_pairs, without_adapter
from perilune.models.decoder import Decoder
from perilune.rollout.groups import Groups
from perilune.tasks.stage.publishing import (
    MISSING_ADAPTER_HINT,
    RANDOM_LAYER_HINT,
    is_nondeterministic,
    plain_scores,
)
from perilune.tasks.stage.rounding import plain_rounding, rounding_of

EPISODES_PER_STEP = 4  # episodes rescored at each step
REDRAWN_TOKENS = 16  # tokens of each rescored episode that are drawn again
_SERVER_REMEDY = "see in the server's log if it loaded the weights; set engine.precision to its precision"

Array = NDArray[np.float32]


@dataclass(frozen=True)
class LogprobChecker:
    """Compares sampler, learner and reference on the tokens of a step.

    Attributes:
        learner: the learner before the step's updates.
        draws_are_known: whether the episode's id determines the random numbers of its first turn; true in
            environments with one player.
        rounding: bounds on the differences to a server that samples; None for those of the learner's device.
    """

    learner: Learner
    temperature: float
    draws_are_known: bool = False
    rounding: Rounding | None = None

    def check_sampler(self, groups: Groups, step: int) -> None:
        """Rescore a few episodes of the learner's version, one sequence at a time.

        Args:
            step: number of completed steps.

        Raises:
            WorkFailedError: when the sampler's log-probs differ, with the likely mistake; when its tokens do
                not follow from its random numbers.
        """
        current = [
            episode
            for group in groups
            for episode in group
            if episode.sampled and self._current(episode).all()
        ]
        stride = max(1, len(current) // EPISODES_PER_STEP)
        for episode in current[step % stride :: stride][:EPISODES_PER_STEP]:
            expected, first = _rescore(self.learner.decoder, episode, self.temperature)
            actual = episode.logprobs[episode.loss_mask]
            rounding = self.rounding or plain_rounding(self.learner.decoder)
            if not rounding.allows(_gaps(actual, expected)):
                raise self._error(_max_gap(actual, expected), episode, actual, "sampler", step)
            if self.draws_are_known and episode.group_id.count("/") == 1:  # not of a sub-agent
                self._check_draws(episode, first)

    def _check_draws(self, episode: Episode, distributions: Array) -> None:
        """Draw the first tokens again.

        Args:
            distributions: float32[N, V], log-probs of the vocabulary at the first N tokens.

        Raises:
            WorkFailedError: when more tokens differ than rounding explains.
        """
        count = min(len(distributions), int(np.argmin(np.append(episode.loss_mask, False))))
        step, index, sample = (int(part) for part in episode.episode_id.split("/"))
        sums = np.exp(distributions[:count].astype(np.float64)).cumsum(1)
        rows, tokens = np.arange(count), episode.token_ids[:count]
        above = sums[rows, tokens] / sums[:, -1]
        below = np.where(tokens > 0, sums[rows, tokens - 1], 0) / sums[:, -1]
        rounding = plain_rounding(self.learner.decoder)
        slack, allowed = rounding.slack, rounding.missed * count

        def misses(step: int) -> NDArray[np.int64]:
            key = np.array([[episode.seed, step, index, sample]], np.uint64)
            draws = uniforms(key, np.arange(count)[None])[0]
            return np.flatnonzero((draws < below - slack) | (draws > above + slack))

        missed = misses(step)
        if len(missed) <= allowed:
            return
        earlier = range(step - 1, max(0, step - 9), -1)
        other = next((old for old in earlier if len(misses(old)) <= allowed), None)
        why = "its log-probs are of another distribution (top-p, top-k, another temperature?)"
        if other is not None:
            why = f"it drew them with the random numbers of step {other}"
        what = f"the sampler chose {len(missed)} of {count} tokens that its random numbers do not give: {why}"
        raise WorkFailedError(what, where=f"step {step}, episode {episode.episode_id}", remedy=REPORT_BUG)

    def check_reference(
        self, batches: Sequence[PackedBatch], reference: Decoder, groups: Groups, step: int
    ) -> None:
        """Rescore an episode with the reference policy.

        Args:
            batches: micro-batches, with the reference log-probs that the KL uses.
            step: number of completed steps.

        Raises:
            WorkFailedError: when the log-probs differ, with their likely source.
        """
        scored = [
            (batch, batch.reference_logprobs) for batch in batches if batch.reference_logprobs is not None
        ]
        if not scored:
            return
        batch, logprobs = scored[step % len(scored)]
        by_id = {episode.episode_id: episode for group in groups for episode in group}
        episodes = batch.split_by_episode(logprobs)
        name, actual = episodes[step % len(episodes)]
        episode = replace(by_id[name], routed_experts=None)
        rounding = plain_rounding(reference)
        expected = rescore(reference, episode, self.temperature)
        if rounding.allows(_gaps(actual, expected)):
            return
        sources = {
            "at temperature 1": rescore(reference, episode, 1.0),
            "the sampler's": episode.logprobs[episode.loss_mask],
            "the learner's": rescore(self.learner.decoder, episode, self.temperature),
        }
        known = [
            f": they are {name}" for name, other in sources.items() if rounding.allows(_gaps(actual, other))
        ]
        raise WorkFailedError(
            f"the reference log-probs of the KL differ by {_max_gap(actual, expected):.3g} nats from the"
            f" reference policy's own{known[0] if known else ''}",
            where=f"step {step + 1}, episode {episode.episode_id}",
            remedy=REPORT_BUG,
        )

    def check_learner(
        self, figures: Mapping[str, float], batches: Sequence[PackedBatch], groups: Groups, step: int
    ) -> None:
        """Check the learner's figures over all tokens before the update.

        Args:
            figures: the result of `Learner.forward_backward`.
            step: number of completed steps.

        Raises:
            WorkFailedError: when the log-prob gap on tokens of the current version is more than rounding,
                with the likely mistake; when there is a KL to the reference before the first update.
        """
        rounding = rounding_of(self.learner.decoder)
        kl, gap = figures.get("kl_reference", 0.0), figures.get("logprob_gap_max", 0.0)
        limit = min(rounding.largest, rounding.kl)
        if self.learner.version == 0 and not abs(kl) <= limit:
            raise WorkFailedError(
                f"kl_reference is {kl:.3g} nats per token before the first update, when policy and reference"
                f" are equal; rounding explains at most {limit:g}",
                where=f"step {step + 1}",
                remedy=REPORT_BUG,
            )
        mean, divergence = figures.get("logprob_gap_mean", 0.0), figures.get("logprob_gap_kl", 0.0)
        if (self.rounding or rounding).allows_statistics(gap, mean, divergence):
            return
        by_id = {episode.episode_id: episode for group in groups for episode in group}
        gaps = [
            (_gaps(episode.logprobs[episode.loss_mask], logprobs)[self._current(episode)], episode, logprobs)
            for batch in batches
            for name, logprobs in batch.split_by_episode(token_logprobs(self.learner.decoder, batch))
            if self._current(episode := by_id[name]).any()
        ]
        _, worst, logprobs = max(gaps, key=lambda item: float(np.abs(item[0]).max(initial=0.0)))
        if rounding.allows(np.concatenate([values for values, _, _ in gaps])):
            raise WorkFailedError(
                f"the learner's log-probs with a gradient differ by {gap:.3g} nats from the sampler's and"
                f" from its own without one: {RANDOM_LAYER_HINT}",
                where=f"step {step + 1}",
                remedy=REPORT_BUG,
            )
        raise self._error(gap, worst, logprobs, "learner", step)

    def _current(self, episode: Episode) -> NDArray[np.bool_]:
        """Return for each token that the policy sampled whether the learner's version sampled it."""
        current: NDArray[np.bool_] = episode.policy_version[episode.loss_mask] == self.learner.version
        return current

    def _error(self, gap: float, episode: Episode, logprobs: Array, whose: str, step: int) -> WorkFailedError:
        decoder = self.learner.decoder
        reason = explain_mismatch(episode, logprobs, decoder, self.temperature, whose)
        return WorkFailedError(
            f"sampler and learner differ by up to {gap:.3g} nats on the same weights, and"
            f" {self.rounding or rounding_of(decoder)}; {reason}",
            where=f"step {step + 1}, episode {episode.episode_id}",
            remedy=REPORT_BUG if self.rounding is None else _SERVER_REMEDY,
        )


def rescore(decoder: Decoder, episode: Episode, temperature: float) -> Array:
    """Return log-probs float32[N] of the tokens that the policy sampled, with the episode's routes."""
    return _rescore(decoder, episode, temperature)[0]


def _rescore(decoder: Decoder, episode: Episode, temperature: float) -> tuple[Array, Array]:
    """Return `rescore`, and log-probs float32[N, V] of the vocabulary at up to `REDRAWN_TOKENS` tokens."""
    ids = np.concatenate([episode.prompt_ids, episode.token_ids]).astype(np.int64)
    routes = pack_routes([episode], [0])
    replay = None if routes is None else RouteReplay(routes.to(next(decoder.parameters()).device))
    chosen, first = plain_scores(decoder, ids, len(episode.token_ids), temperature, replay, REDRAWN_TOKENS)
    return chosen.cpu().numpy()[episode.loss_mask], first.cpu().numpy()


def explain_mismatch(
    episode: Episode, logprobs: Array, decoder: Decoder, temperature: float, whose: str
) -> str:
    """Return the known mistake that explains why `logprobs` differ from the right ones.

    Args:
        logprobs: float32[N], of the tokens that the policy sampled.
        decoder: the learner's.
        whose: "sampler" or "learner", which computed `logprobs`.
    """
    rounding = plain_rounding(decoder)
    right = rescore(decoder, episode, temperature)

    def are(some: Array, others: Array) -> bool:
        return rounding.allows(_gaps(some, others))

    if is_nondeterministic(decoder, np.concatenate([episode.prompt_ids, episode.token_ids]).astype(np.int64)):
        return f"the learner's forward pass gives other values each time: {RANDOM_LAYER_HINT}"
    if are(logprobs, right):
        other = "learner" if whose == "sampler" else "sampler"
        note = _base_note(episode, decoder, temperature)
        return f"the {whose}'s log-probs are right, so the {other}'s are wrong{note}"
    if are(logprobs, rescore(decoder, episode, 1.0)):
        return f"the temperature {temperature:g} is missing from the {whose}'s log-probs"
    if are(logprobs, rescore(decoder, episode, temperature**2)):
        return f"the temperature {temperature:g} is twice in the {whose}'s log-probs"
    if len(right) > 1 and (are(logprobs[1:], right[:-1]) or are(logprobs[:-1], right[1:])):
        return f"the {whose}'s log-probs are off by one token"
    note = _base_note(episode, decoder, temperature)
    return f"temperature and shift are right, so the {whose} has other weights, tokens or arithmetic{note}"


def _base_note(episode: Episode, decoder: Decoder, temperature: float) -> str:
    """Return a note if the sampler computed without the learner's adapter, or ""."""
    if not adapter_pairs(decoder):
        return ""
    gaps = _gaps(episode.logprobs[episode.loss_mask], rescore(without_adapter(decoder), episode, temperature))
    return f"; it sampled with {MISSING_ADAPTER_HINT}" if rounding_of(decoder).allows(gaps) else ""


def _gaps(one: Array, other: Array) -> NDArray[np.float64]:
    return one.astype(np.float64) - other


def _max_gap(one: Array, other: Array) -> float:
    return float(np.abs(_gaps(one, other)).max(initial=0.0))
