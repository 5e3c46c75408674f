"""The sampler consistency check: an episode holds exactly what the engine sampled and the verifier scored."""

from collections.abc import Sequence

import numpy as np

from perilune.data.episode import Episode
from perilune.engine.request import SamplingParams
from perilune.environments.core.protocol import Failure, Outcome
from perilune.errors import REPORT_BUG, WorkFailedError
from perilune.rollout.rollout import AgentRollout, Rollout, Trajectory
from perilune.verifiers.worker import TEXT_CHECKSUM_KEY, text_checksum

MAX_LOGPROB = 1e-5  # nats by which rounding may lift a log-prob above 0


def check_group(
    group: Sequence[Episode], parts: Sequence[AgentRollout], params: SamplingParams | None
) -> None:
    """Compare the episodes of a group with the parts of rollouts that they were made from.

    Args:
        params: the sampling parameters of Perilune's engine; None for a server, which may end turns by other
            rules.

    Raises:
        WorkFailedError: when an episode is missing; when tokens, log-probs or versions differ from the
            sampled ones, or a turn continued other tokens than the episode has before it; when the loss mask
            does not mark the sampled tokens; when `params` cannot produce a turn; when a reward is not the
            verifier's, or hides a failure.
    """
    if len(group) != len(parts):
        raise WorkFailedError(f"a group has {len(group)} episodes of {len(parts)} samples", remedy=REPORT_BUG)
    prompts = {episode.prompt_ids.tobytes() for episode in group if not episode.failure}
    begins_alike = all(part.trajectory.rounds[:1] == [0] and not part.agent for part in parts)
    if len({episode.group_id for episode in group}) > 1 or (begins_alike and len(prompts) > 1):
        raise _error(group[0], "shares its group with an answer to another prompt")
    for episode, part in zip(group, parts, strict=True):
        _check_tokens(episode, part.trajectory)
        if params is not None:
            _check_sampling(episode, part.trajectory, params)
        _check_reward(episode, part.outcome)


def check_scored_text(rollout: Rollout, texts: Sequence[str]) -> None:
    """Check that the environment scored `texts`, the actions of the last round.

    Raises:
        WorkFailedError: when the checksum of the scored text differs.
    """
    result = rollout.session.result
    if not isinstance(result, Failure) and result.info.get(TEXT_CHECKSUM_KEY) != text_checksum(texts):
        name = "/".join(map(str, (*rollout.key[1:], rollout.sample)))
        raise WorkFailedError(
            f"the environment scored another text than episode {name} sampled:"
            " does the score belong to another answer?",
            remedy=REPORT_BUG,
        )


def _check_tokens(episode: Episode, trajectory: Trajectory) -> None:
    sampled = np.zeros(len(episode.token_ids), np.bool_)
    sequence = np.concatenate([episode.prompt_ids, episode.token_ids])
    for turn in trajectory.turns:
        completion = turn.completion
        part = slice(turn.start, turn.start + len(completion.token_ids))
        sampled[part] = True
        if not np.array_equal(sequence[: len(episode.prompt_ids) + turn.start], turn.context):
            raise _error(episode, "has a turn that continued other tokens: was its text tokenized again?")
        if not np.array_equal(episode.token_ids[part], completion.token_ids):
            raise _error(episode, "has other tokens than were sampled: was its text tokenized again?")
        if not np.array_equal(episode.logprobs[part], completion.logprobs, equal_nan=True):
            raise _error(episode, "has other log-probs than its tokens were sampled with")
        if not np.array_equal(episode.policy_version[part], completion.policy_version):
            raise _error(episode, "has other policy versions than sampled it")
    if not np.array_equal(sampled, episode.loss_mask):
        index = int(np.flatnonzero(sampled != episode.loss_mask)[0])
        if episode.loss_mask[index]:
            raise _error(episode, f"has a loss mask with token {index}, which the policy did not choose")
        last = " (the end-of-sequence token)" if index == len(episode.loss_mask) - 1 else ""
        raise _error(episode, f"has a loss mask that leaves out token {index}{last}, which the policy chose")


def _check_sampling(episode: Episode, trajectory: Trajectory, params: SamplingParams) -> None:
    """Check that a sampler with `params` can have produced the turns."""
    for turn in trajectory.turns:
        sample, count = turn.completion, len(turn.completion.token_ids)
        if not (np.isfinite(sample.logprobs).all() and (sample.logprobs <= MAX_LOGPROB).all()):
            raise _error(episode, f"has a sampled token with log-prob {sample.logprobs.max():.4g}")
        if count > params.max_tokens:
            raise _error(episode, f"has a turn of {count} tokens, and max_tokens is {params.max_tokens}")
        if sample.finish_reason == "aborted":
            if not episode.failure:
                raise _error(episode, f"was aborted by the engine and has reward {episode.reward}")
            continue
        stops = np.isin(sample.token_ids, params.stop_token_ids)
        if stops[:-1].any():
            raise _error(episode, "has tokens after its end-of-sequence token")
        if params.stop_token_ids and not params.stop and stops[-1:].any() != (sample.finish_reason == "stop"):
            raise _error(
                episode,
                f"ended by {sample.finish_reason!r}, and its last token is"
                f" {'the' if stops[-1:].any() else 'not an'} end-of-sequence token: was it cut off?",
            )


def _check_reward(episode: Episode, outcome: Outcome) -> None:
    if isinstance(outcome, Failure):
        if episode.reward is not None or not episode.failure:
            raise _error(
                episode, f"has reward {episode.reward}, and its {outcome.boundary} failed: {outcome.reason}"
            )
    elif episode.failure or episode.reward != outcome.reward or episode.reward_terms != dict(outcome.terms):
        raise _error(
            episode,
            f"has reward {episode.reward}, and its verifier gave {outcome.reward}:"
            " does the reward belong to another answer?",
        )


def _error(episode: Episode, problem: str) -> WorkFailedError:
    return WorkFailedError(f"episode {episode.episode_id} {problem}", remedy=REPORT_BUG)
