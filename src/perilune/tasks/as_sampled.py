"""An episode must say what the engine sampled and what the verifier said: nothing may be lost between."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perilune.data.episode import Episode
from perilune.engine.request import Completion
from perilune.environments.protocol import Failure, Outcome
from perilune.errors import WorkFailedError
from perilune.learn.checks import DEFECT


def check_group(
    group: Sequence[Episode], completions: Sequence[Completion], outcomes: Sequence[Outcome]
) -> None:
    """Compare the episodes of a group with what they were made of.

    Raises:
        WorkFailedError: when one is missing; when tokens, log-probs or versions are not the sampled ones
            (text that was tokenised again gives other tokens); when a sampled token, the last one above all,
            is not learned; when a verifier's failure has become a reward.
    """
    if not len(group) == len(completions) == len(outcomes):
        raise WorkFailedError(
            f"a group has {len(group)} episodes of {len(completions)} samples", remedy=DEFECT
        )
    if len({(one.group_id, one.prompt_ids.tobytes()) for one in group}) > 1:
        raise _wrong(group[0], "shares its group with an answer to another prompt")
    for episode, completion, outcome in zip(group, completions, outcomes, strict=True):
        if not np.array_equal(episode.token_ids, completion.token_ids):
            raise _wrong(episode, "has other tokens than were sampled: was its text tokenised again?")
        if not np.array_equal(episode.logprobs, completion.logprobs, equal_nan=True):
            raise _wrong(episode, "has other log-probs than its tokens were sampled with")
        if not np.array_equal(episode.policy_version, completion.policy_version):
            raise _wrong(episode, "has other policy versions than sampled it")
        if not episode.loss_mask.all():
            place = int(np.flatnonzero(~episode.loss_mask)[0])
            last = " (the end-of-sequence token)" if place == len(episode.loss_mask) - 1 else ""
            raise _wrong(
                episode, f"has a loss mask that leaves out token {place}{last}, which the policy chose"
            )
        if isinstance(outcome, Failure) and (episode.reward is not None or not episode.failure):
            raise _wrong(episode, f"has reward {episode.reward}, and its verifier failed: {outcome.reason}")


def _wrong(episode: Episode, what: str) -> WorkFailedError:
    return WorkFailedError(f"episode {episode.episode_id} {what}", remedy=DEFECT)
