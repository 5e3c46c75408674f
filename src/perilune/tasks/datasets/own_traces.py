"""A policy's own answers as training records."""

from collections.abc import Sequence

import perilune
from perilune.bundle.job import Job
from perilune.data.episode import Episode
from perilune.data.generators.registry import replace_paths_by_digests
from perilune.data.records import Provenance, TraceRecord, settings_digest
from perilune.tasks.stage.outcomes import passed


def most_likely(episodes: Sequence[Episode]) -> Episode | None:
    """The episode with the highest mean log-prob of its sampled tokens; None without episodes."""
    return max(episodes, key=lambda one: float(one.logprobs[one.loss_mask].mean()), default=None)


def reason_to_reject(episode: Episode) -> str | None:
    """Why an answer is not training data; None for a right one."""
    if episode.failure:
        return f"failure: {episode.failure}"
    if not passed(episode):
        return f"wrong: score {episode.reward:g}"
    return "truncated: cut off" if episode.truncated else None


def sampling_provenance(job: Job) -> Provenance:
    """The provenance of rows that a stage samples: a digest of its spec, model, environment and inputs."""
    inputs = {one.name: one.digest for one in job.inputs if one.kind != "tasks"}
    settings = settings_digest(
        spec=job.spec, model=job.model, environment=replace_paths_by_digests(job.environment), inputs=inputs
    )
    return Provenance("sampled", perilune.__version__, settings)


def to_record(episode: Episode, provenance: Provenance, system: str = "") -> TraceRecord:
    """A scored episode as a record, without the system message `system` that it was sampled with."""
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
