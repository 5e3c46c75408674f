"""The sampler consistency check: an episode is what the engine sampled and what the verifier said of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perilune.data.episode import Episode
from perilune.engine.request import SamplingParams
from perilune.environments.core.protocol import Failure
from perilune.errors import REPORT_BUG, WorkFailedError
from perilune.rollout.rollout import Rollout, Seat
from perilune.verifiers.worker import TEXT_CHECKSUM, text_checksum

ROUNDING = 1e-5  # nats by which a log-prob may be above 0


def check_group(
    group: Sequence[Episode],
    games: Sequence[Rollout],
    player: int,
    params: SamplingParams | None,
) -> None:
    """Compare the episodes of a group with the games they were made of.

    Args:
        params: what our engine was asked to sample with; None for a server, which may end a turn by rules of
            its own.

    Raises:
        WorkFailedError: when an episode is missing; when tokens, log-probs or versions are not the sampled
            ones, or a turn continued other tokens than the episode has before it; when the loss mask is not
            the sampled tokens; when a turn cannot come from `params`; when a reward is not the verifier's, or
            stands in for a failure.
    """
    if len(group) != len(games):
        raise WorkFailedError(f"a group has {len(group)} episodes of {len(games)} samples", remedy=REPORT_BUG)
    prompts = {one.prompt_ids.tobytes() for one in group if not one.failure}
    if len({one.group_id for one in group}) > 1 or (player == 0 and len(prompts) > 1):
        raise _wrong(group[0], "shares its group with an answer to another prompt")
    for episode, game in zip(group, games, strict=True):
        _check_tokens(episode, game.seats[player])
        if params is not None:
            _check_possible(episode, game.seats[player], params)
        _check_reward(episode, game, player)


def check_judged(game: Rollout, text: str) -> None:
    """Compare the text of the turn that a game has just taken with the one its environment's answer is about.

    Raises:
        WorkFailedError: when the answer is about another text.
    """
    found = game.session.result
    if not isinstance(found, Failure) and found.info.get(TEXT_CHECKSUM) != text_checksum(text):
        step = "/".join(map(str, (*game.key[1:], game.sample)))
        raise WorkFailedError(
            f"episode {step} was judged by another text than it sampled: was it another answer's?",
            remedy=REPORT_BUG,
        )


def _check_tokens(episode: Episode, seat: Seat) -> None:
    learned = np.zeros(len(episode.token_ids), np.bool_)
    sequence = np.concatenate([episode.prompt_ids, episode.token_ids])
    for turn in seat.turns:
        completion = turn.completion
        place = slice(turn.start, turn.start + len(completion.token_ids))
        learned[place] = True
        if not np.array_equal(sequence[: len(episode.prompt_ids) + turn.start], turn.asked):
            raise _wrong(episode, "has a turn that continued other tokens: was its text tokenised again?")
        if not np.array_equal(episode.token_ids[place], completion.token_ids):
            raise _wrong(episode, "has other tokens than were sampled: was its text tokenised again?")
        if not np.array_equal(episode.logprobs[place], completion.logprobs, equal_nan=True):
            raise _wrong(episode, "has other log-probs than its tokens were sampled with")
        if not np.array_equal(episode.policy_version[place], completion.policy_version):
            raise _wrong(episode, "has other policy versions than sampled it")
    if not np.array_equal(learned, episode.loss_mask):
        place_ = int(np.flatnonzero(learned != episode.loss_mask)[0])
        if episode.loss_mask[place_]:
            raise _wrong(episode, f"has a loss mask with token {place_}, which the policy did not choose")
        last = " (the end-of-sequence token)" if place_ == len(episode.loss_mask) - 1 else ""
        raise _wrong(episode, f"has a loss mask that leaves out token {place_}{last}, which the policy chose")


def _check_possible(episode: Episode, seat: Seat, params: SamplingParams) -> None:
    """Whether a sampler with `params` can have produced the turns."""
    for turn in seat.turns:
        one, count = turn.completion, len(turn.completion.token_ids)
        if not (np.isfinite(one.logprobs).all() and (one.logprobs <= ROUNDING).all()):
            raise _wrong(episode, f"has a sampled token with log-prob {one.logprobs.max():.4g}")
        if count > params.max_tokens:
            raise _wrong(episode, f"has a turn of {count} tokens, and max_tokens is {params.max_tokens}")
        if one.finish_reason == "aborted":
            if not episode.failure:
                raise _wrong(episode, f"was aborted by the engine and has reward {episode.reward}")
            continue
        stops = np.isin(one.token_ids, params.stop_token_ids)
        if stops[:-1].any():
            raise _wrong(episode, "has tokens after its end-of-sequence token")
        if params.stop_token_ids and not params.stop and stops[-1:].any() != (one.finish_reason == "stop"):
            raise _wrong(
                episode,
                f"ended by {one.finish_reason!r}, and its last token is"
                f" {'the' if stops[-1:].any() else 'not an'} end-of-sequence token: was it cut off?",
            )


def _check_reward(episode: Episode, game: Rollout, player: int) -> None:
    outcome = game.outcome(player)
    if isinstance(outcome, Failure):
        if episode.reward is not None or not episode.failure:
            raise _wrong(
                episode, f"has reward {episode.reward}, and its {outcome.boundary} failed: {outcome.reason}"
            )
    elif episode.failure or episode.reward != outcome.reward or episode.reward_terms != dict(outcome.terms):
        raise _wrong(
            episode,
            f"has reward {episode.reward}, and its verifier said {outcome.reward}: was it another answer's?",
        )


def _wrong(episode: Episode, what: str) -> WorkFailedError:
    return WorkFailedError(f"episode {episode.episode_id} {what}", remedy=REPORT_BUG)
