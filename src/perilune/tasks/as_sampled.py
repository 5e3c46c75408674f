"""An episode must say what the engine sampled and what the verifier said: nothing may be lost between."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perilune.data.episode import Episode
from perilune.environments.protocol import Failure
from perilune.errors import WorkFailedError
from perilune.learn.checks import DEFECT
from perilune.tasks.games import Game, Seat


def check_group(group: Sequence[Episode], games: Sequence[Game], player: int) -> None:
    """Compare the episodes of a group with the games they were made of.

    Raises:
        WorkFailedError: when one is missing; when tokens, log-probs or versions are not the sampled ones
            (text that was tokenised again gives other tokens), or a turn continued other tokens than the
            episode has before it; when a sampled token, the last one above all, is not learned, or one that
            was not sampled is; when a failure has become a reward.
    """
    if len(group) != len(games):
        raise WorkFailedError(f"a group has {len(group)} episodes of {len(games)} samples", remedy=DEFECT)
    prompts = {one.prompt_ids.tobytes() for one in group if not one.failure}
    if len({one.group_id for one in group}) > 1 or (player == 0 and len(prompts) > 1):
        raise _wrong(group[0], "shares its group with an answer to another prompt")
    for episode, game in zip(group, games, strict=True):
        _check_tokens(episode, game.seats[player])
        outcome = game.outcome(player)
        if isinstance(outcome, Failure) and (episode.reward is not None or not episode.failure):
            raise _wrong(
                episode, f"has reward {episode.reward}, and its {outcome.boundary} failed: {outcome.reason}"
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


def _wrong(episode: Episode, what: str) -> WorkFailedError:
    return WorkFailedError(f"episode {episode.episode_id} {what}", remedy=DEFECT)
