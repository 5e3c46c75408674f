"""Sources of `perilune traces`: the episode files of an experiment, a run or a folder of attempts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from perilune.bundle.job import Job
from perilune.data.episode import Episode
from perilune.data.episodes_file import read_episodes
from perilune.environments.core.rewards import GOLD_METRIC
from perilune.errors import RequestError
from perilune.files import read_json
from perilune.models.checkpoints.folder import CheckpointFolder
from perilune.models.text.tokenizer import Tokenizer
from perilune.traces.cassette import Cassette
from perilune.traces.record import Origin, group_rollouts, record_episodes
from perilune.traces.replay import Replayer
from perilune.traces.suite import tokenizer_digest
from perilune.traces.where import parse_where
from perilune.ui.attempt import Attempt
from perilune.ui.experiment import view_target
from perilune.ui.view import StageView

EPISODES_PER_CHUNK = 512  # episodes recorded at a time


@dataclass
class RecordedEpisodes:
    """Cassettes, the tokenizers they need, and the reasons for refused episodes."""

    cassettes: dict[str, Cassette] = field(default_factory=dict)
    tokenizers: dict[str, Tokenizer] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)


def record_targets(targets: Sequence[str], where: str, most: int) -> RecordedEpisodes:
    """Record the episodes that fulfill `where`, at most `most` of each file, evenly spaced.

    Raises:
        RequestError: when a target does not exist, or has no episodes that fulfill the condition.
    """
    condition, recorded, count = parse_where(where), RecordedEpisodes(), 0
    with Replayer(recorded.tokenizers.__getitem__) as replayer:
        for stage, attempt, files in _stages(targets):
            origin = _origin(stage, attempt, recorded)
            if origin is None:
                continue
            for path in files:
                fitting = [rows for rows in group_rollouts(read_episodes(path)) if any(map(condition, rows))]
                count += len(fitting)
                chosen = fitting[:: max(1, -(-len(fitting) // most))]
                greedy = {"temperature": 0.0} if path == attempt.greedy_file else {}
                file_origin = replace(origin, sampling=origin.sampling | greedy)
                for start in range(0, len(chosen), EPISODES_PER_CHUNK):
                    members = [item for rows in chosen[start : start + EPISODES_PER_CHUNK] for item in rows]
                    episodes = _restore_rewards(members, attempt)
                    cassettes, refused = record_episodes(episodes, path.name, file_origin, replayer)
                    recorded.cassettes |= {cassette.digest: cassette for cassette in cassettes}
                    recorded.refused += refused
    if not recorded.refused:
        _require_some(count, where, targets)
    return recorded


def fitting_episodes(targets: Sequence[str], where: str) -> Iterator[tuple[Path, list[Episode]]]:
    """Yield the episodes that fulfill `where`, by file.

    Raises:
        RequestError: when a target does not exist, or has no episodes that fulfill the condition.
    """
    condition, count = parse_where(where), 0
    for _, _, files in _stages(targets):
        for path in files:
            if fitting := [episode for episode in read_episodes(path) if condition(episode)]:
                count += len(fitting)
                yield path, fitting
    _require_some(count, where, targets)


def _stages(targets: Sequence[str]) -> Iterator[tuple[StageView, Attempt, list[Path]]]:
    """Yield the stages of all targets that wrote episodes, with the files of their last attempt."""
    for stage in (stage for target in targets for stage in view_target(target).stages):
        attempt = Attempt(stage.attempt_dir)
        greedy = attempt.greedy_file
        if files := [*attempt.episode_files, *([greedy] if greedy else [])]:
            yield stage, attempt, files


def _require_some(seen: int, where: str, targets: Sequence[str]) -> None:
    if not seen:
        raise RequestError(
            "no episode fulfils the condition",
            where=f"--where {where}" if where else ", ".join(targets),
            remedy="perilune data inspect FILE.parquet lists the episodes' figures",
        )


def _origin(stage: StageView, attempt: Attempt, recorded: RecordedEpisodes) -> Origin | None:
    """Return the origin of a stage's episodes, and add its tokenizer; None if the stage stores too little."""
    if attempt.root is None:
        return None
    job = Job.model_validate(read_json(attempt.root / "job.json"))
    folder = _model_folder(job, attempt)
    if folder is None or not job.environment or "max_tokens" not in job.spec:
        recorded.refused[f"stage {stage.name} stores no model or sampling settings"] += 1
        return None
    tokenizer = Tokenizer.load(folder)
    with TemporaryDirectory() as saved:
        tokenizer.save(saved)
        digest = tokenizer_digest(Path(saved))
    recorded.tokenizers[digest] = tokenizer
    sampling = {
        "max_tokens": job.spec["max_tokens"],
        "temperature": float(job.spec.get("temperature") or 1.0),
        "stop_token_ids": tuple(
            dict.fromkeys((*CheckpointFolder(folder).end_tokens(), tokenizer.eos_token_id))
        ),
        "positions": read_json(folder / "config.json").get("max_position_embeddings"),
    }
    return Origin(
        run=stage.run_id,
        stage=stage.name,
        environment=job.at(attempt.root).environment,
        section=job.environment,
        seed=job.seed,
        sampling=sampling | (job.spec.get("sampling") or {}),
        tokenizer=digest,
        checkpoint=_sampling_checkpoint(job),
        system=system if isinstance(system := job.spec.get("system"), str) else "",
    )


def _sampling_checkpoint(job: Job) -> str | None:
    """Return the digest of the weights that a stage began with; None if its sub-agents have other weights."""
    digests = {item.name: item.digest for item in job.inputs}
    if "sub_agent_checkpoint" in digests:
        return None
    return digests.get("checkpoint") or digests.get("model")


def _restore_rewards(episodes: list[Episode], attempt: Attempt) -> list[Episode]:
    """Return episodes with the rewards of their environment, without those that rl added."""
    if not attempt.spec.get("auxiliary_rewards") or attempt.spec.get("reward_model"):
        return episodes
    return [replace(episode, reward=episode.metrics.get(GOLD_METRIC, episode.reward)) for episode in episodes]


def _model_folder(job: Job, attempt: Attempt) -> Path | None:
    """Return the folder of the weights that a stage started from, or of those that it made."""
    assert attempt.root is not None
    inputs = [attempt.root / item.path for item in job.inputs if item.name in ("checkpoint", "model")]
    folders = [path for path in (*inputs, *attempt.model_folders) if (path / "tokenizer.json").is_file()]
    return folders[0] if folders else None
