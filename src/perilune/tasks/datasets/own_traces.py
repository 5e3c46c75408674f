"""A policy's own answers as training records."""

from collections.abc import Sequence

import perilune
from perilune.bundle.job import Job
from perilune.data.episode import Episode
from perilune.data.generators.registry import replace_paths_by_digests
from perilune.data.records import Provenance, TraceRecord, settings_digest
from perilune.tasks.stage.outcomes import is_correct


def most_likely(episodes: Sequence[Episode]) -> Episode | None:
    """Return the episode with the highest mean log-prob of its sampled tokens; None without episodes."""
    return max(episodes, key=lambda episode: float(episode.logprobs[episode.loss_mask].mean()), default=None)


def reason_to_reject(episode: Episode) -> str | None:
    """Return the reason why an answer is not training data; None for a right one."""
    if episode.failure:
        return f"failure: {episode.failure}"
    if not is_correct(episode):
        return f"wrong: score {episode.reward:g}"
    return "truncated: cut off" if episode.truncated else None


def sampling_provenance(job: Job) -> Provenance:
    """Return the provenance of sampled rows: a digest of the spec, model, environment and inputs."""
    inputs = {entry.name: entry.digest for entry in job.inputs if entry.kind != "tasks"}
    settings = settings_digest(
        spec=job.spec, model=job.model, environment=replace_paths_by_digests(job.environment), inputs=inputs
    )
    return Provenance("sampled", perilune.__version__, settings)


def to_record(episode: Episode, provenance: Provenance, system: str = "") -> TraceRecord:
    """Return a scored episode as a record, without the system message `system` that it was sampled with."""
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
