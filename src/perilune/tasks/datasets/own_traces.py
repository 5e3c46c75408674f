"""A policy's own answers as training data: which of them, and as what."""

from __future__ import annotations

from collections.abc import Sequence

import perilune
from perilune.bundle.job import Job
from perilune.data.episode import Episode
from perilune.data.generators.registry import by_content
from perilune.data.records import Provenance, TraceRecord, settings_digest


def likeliest(episodes: Sequence[Episode]) -> Episode | None:
    """The one whose own tokens are the likeliest on average; None of none."""
    return max(episodes, key=lambda one: float(one.logprobs[one.loss_mask].mean()), default=None)


def sampled_by(job: Job) -> Provenance:
    """What every row that a stage samples says of where it comes from: all that the stage was told."""
    inputs = {one.name: one.digest for one in job.inputs if one.kind != "tasks"}
    settings = settings_digest(
        spec=job.spec, model=job.model, environment=by_content(job.environment), inputs=inputs
    )
    return Provenance("sampled", perilune.__version__, settings)


def own_record(episode: Episode, provenance: Provenance, system: str = "") -> TraceRecord:
    """A judged episode as a record, without the `system` message that it was played under."""
    assert episode.reward is not None
    return TraceRecord(
        episode.messages[1 if system else 0 :],
        environment=episode.environment,
        task_id=episode.task_id,
        score=episode.reward,
        source="sampled/hinted" if system else "sampled/own",
        seed=episode.seed,
        provenance=provenance,
    )
