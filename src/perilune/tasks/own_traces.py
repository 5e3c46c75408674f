"""A policy's own answers as training data: which of them, and as what."""

from __future__ import annotations

from collections.abc import Sequence

from perilune.data.episode import Episode
from perilune.data.records import TraceRecord, make_record


def likeliest(episodes: Sequence[Episode]) -> Episode | None:
    """The one whose own tokens are the likeliest on average; None of none."""
    return max(episodes, key=lambda one: float(one.logprobs[one.loss_mask].mean()), default=None)


def own_record(episode: Episode, system: str = "") -> TraceRecord:
    """A judged episode as a record, without the `system` message that it was played under."""
    assert episode.reward is not None
    return make_record(
        [dict(message) for message in episode.messages[1 if system else 0 :]],
        environment=episode.environment,
        task_id=episode.task_id,
        score=episode.reward,
        source="sampled/hinted" if system else "sampled/own",
        seed=episode.seed,
    )
