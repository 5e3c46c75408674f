"""Records episodes of a run as cassettes.

A cassette is kept only if it now plays exactly as it was recorded. This excludes episodes that depend on an
opponent, a reward model, or clocks and networks inside a tool, which no tape holds.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import Any

from perilune.data.episode import Episode
from perilune.environments.core.mixture import find_part
from perilune.environments.core.protocol import Environment, Split, Task
from perilune.environments.core.registry import make_environment
from perilune.errors import PeriluneError
from perilune.traces.cassette import Cassette, Sampling, Source, TaskRecord, extract_tracks
from perilune.traces.oracle import make_expectation
from perilune.traces.replay import Replay, Replayer

_NUMBERS = re.compile(r"\d+ ?")  # numbers in differences, which would make every reason unique
MAX_TASKS = 200_000  # tasks of a split that are searched for those of the episodes


@dataclass(frozen=True)
class Origin:
    """The settings of a run that apply to one of its files of episodes.

    Attributes:
        run, stage: see `Source`.
        environment: the environment section, with paths that exist on this machine.
        section: the environment section of the recipe, for the cassette.
        system: system message before every prompt.
        sampling: fields of `Sampling`, without key and sample.
        tokenizer, checkpoint: digests, see `Cassette`.
    """

    run: str
    stage: str
    environment: Mapping[str, Any]
    section: Mapping[str, Any]
    seed: int
    sampling: dict[str, Any]
    tokenizer: str
    checkpoint: str | None
    system: str = ""


def record_episodes(
    episodes: Sequence[Episode], file: str, origin: Origin, replayer: Replayer
) -> tuple[list[Cassette], Counter[str]]:
    """Record episodes of one file. Return the cassettes, and the number of rejected rollouts by reason.

    The episodes of all players of a rollout make one cassette.

    Raises:
        RequestError: when the environment cannot be made.
    """
    environment = make_environment(origin.environment)
    tasks = find_tasks(environment, {episode.task_id for episode in episodes}, origin.seed, origin.system)
    refused: Counter[str] = Counter()
    drafts = []
    for members in group_rollouts(episodes):
        task = tasks.get(members[0].task_id)
        if task is None:
            refused["the environment no longer has its task"] += 1
            continue
        try:
            drafts.append(_draft_cassette(members, task, file, origin, environment))
        except PeriluneError as error:
            refused[error.what] += 1
    environment.close()
    kept = []
    for draft, replay in zip(drafts, replayer.harness(drafts), strict=True):
        cassette = _complete_cassette(draft, replay)
        diffs = replay.differences(tuple(map(make_expectation, cassette.tracks)))
        if replay.error:
            refused[f"its replay stops: {_NUMBERS.sub('', replay.error)}"] += 1
        elif diffs:
            refused[f"it does not replay, {diffs[0].kind}: {_NUMBERS.sub('', diffs[0].where)}"] += 1
        else:
            kept.append(cassette)
    return kept, refused


def group_rollouts(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """Return the episodes of all players of each rollout, without those of sub-agents."""
    rollouts: dict[tuple[str, str, str], list[Episode]] = {}
    for episode in episodes:
        if not episode.is_sub_agent:
            step, index, *_, sample = episode.episode_id.split("/")
            rollouts.setdefault((step, index, sample), []).append(episode)
    return list(rollouts.values())


def find_tasks(environment: Environment, ids: set[str], seed: int, system: str = "") -> dict[str, Task]:
    """Return the tasks with these ids, among the first `MAX_TASKS` of both splits."""
    tasks: dict[str, Task] = {}
    splits: tuple[Split, Split] = ("heldout", "train")
    streams = [islice(environment.tasks(split, seed), MAX_TASKS) for split in splits]
    opening = ({"role": "system", "content": system},) if system else ()
    for drawn in zip_longest(*streams):
        for task in filter(None, drawn):
            if task.task_id in ids:
                tasks[task.task_id] = replace(task, prompt=(*opening, *task.prompt))
        if len(tasks) == len(ids):
            break
    return tasks


def _draft_cassette(
    members: Sequence[Episode], task: Task, file: str, origin: Origin, environment: Environment
) -> Cassette:
    """Return a cassette of the episodes of one rollout, still without the order of actions."""
    step, index, *_, sample = members[0].episode_id.split("/")
    key = (members[0].seed, int(step), int(index))
    sampling = Sampling(key=key, sample=int(sample), **origin.sampling)
    part = find_part(environment, task)
    stop = tuple(getattr(part, "stop_texts", ()))
    agent_stop = stop if getattr(part, "stops_agents", False) else ()
    versions = {int(version) for episode in members for version in episode.policy_version[episode.loss_mask]}
    versions |= {span.policy_version for episode in members for span in episode.spans if span.tokens}
    source = Source(run=origin.run, stage=origin.stage, file=file, episode_id=members[0].episode_id)
    return Cassette(
        source=source,
        environment=dict(origin.section),
        tokenizer=origin.tokenizer,
        checkpoint=origin.checkpoint if versions == {0} else None,
        task=TaskRecord.of(task),
        sampling=sampling,
        order=(),
        tracks=tuple(
            track for episode in members for track in extract_tracks(episode, sampling, stop, agent_stop)
        ),
    )


def _complete_cassette(draft: Cassette, replay: Replay) -> Cassette:
    """Return the cassette with the order of its actions, and only the metrics that a replay computes."""
    replayed = {track.span_id: track.verdict.metrics for track in replay.tracks}
    tracks = []
    for track in draft.tracks:
        known = replayed.get(track.span_id, {})
        metrics = {name: value for name, value in track.verdict.metrics.items() if name in known}
        verdict = track.verdict.model_copy(update={"metrics": metrics})
        tracks.append(track.model_copy(update={"verdict": verdict}))
    return draft.model_copy(update={"order": replay.order, "tracks": tuple(tracks)})
