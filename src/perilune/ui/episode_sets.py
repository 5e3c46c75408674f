"""Sets of episodes that a page lists first and reads later, one at a time."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from perilune.errors import RequestError
from perilune.ui.attempt import STEP_FILE
from perilune.ui.episodes import (
    SAMPLES_LABEL,
    EpisodeFile,
    EpisodeLibrary,
    EpisodeSet,
    EpisodeSource,
    StageEpisodes,
    Tokenizers,
    embed_groups,
    list_files,
)
from perilune.ui.traces import LISTED_TASK, TRACE_FILES, TRACE_TASKS, sample_traces

SET_BUDGET_CHARACTERS = 3_000_000  # characters of JSON of one set


def index_episodes(sources: Sequence[EpisodeSource]) -> EpisodeLibrary:
    """List the sets of all sources, without reading an episode."""
    library = EpisodeLibrary()
    for source in sources:
        sets: list[EpisodeSet] = []
        steps: list[int] = []
        if source.task in TRACE_TASKS:
            sets = [
                EpisodeSet(label, step, 0, 0, "", label)
                for step, (label, file) in enumerate(TRACE_FILES.items())
                if source.attempt.has(f"artifacts/traces/{file}")
            ]
        elif source.task == "evaluate":
            files = list_files(source)
            sets = [EpisodeSet(file.label, file.step, 0, 0, "", file.path.stem) for file in files]
        else:
            steps = source.attempt.episode_steps
        if sets or steps:
            task = LISTED_TASK if source.task in TRACE_TASKS else source.task
            library.stages.append(StageEpisodes(source.stage, task, None, sets, [], steps))
    return library


def find_source(stage: str, sources: Sequence[EpisodeSource]) -> EpisodeSource:
    """Return the source of a stage.

    Raises:
        RequestError: when there is none.
    """
    for source in sources:
        if source.stage == stage:
            return source
    raise RequestError(f"no stage is called {stage}")


def read_set(sources: Sequence[EpisodeSource], stage: str, name: str, episode: str = "") -> dict[str, Any]:
    """Return one set: its groups, the texts of its tokens, and how many of its episodes are included.

    Args:
        episode: id of an episode or a task: read only its group, which a whole set may leave out.

    Raises:
        RequestError: when the stage has no such set.
    """
    source = find_source(stage, sources)
    if source.task in TRACE_TASKS:
        traces = sample_traces(stage, source.attempt)
        for episode_set in traces.sets if traces else ():
            if episode_set.label == name:
                return _set_document(episode_set, [])
    for file in _find_files(name, source):
        if file.path.exists():
            tokenizers = Tokenizers(sources)
            episodes = file.source.attempt.episodes(file.path)
            groups = {item.group_id for item in episodes if episode in (item.episode_id, item.task_id)}
            episodes = [item for item in episodes if item.group_id in groups or not episode]
            vocabulary = tokenizers.find(stage, episodes)
            chosen, _ = embed_groups(file, episodes, vocabulary, SET_BUDGET_CHARACTERS)
            return _set_document(chosen, [] if vocabulary is None else vocabulary.table)
    raise RequestError(f"stage {stage} has no episodes called {name}")


def _find_files(name: str, source: EpisodeSource) -> Iterator[EpisodeFile]:
    if match := STEP_FILE.fullmatch(f"{name}.parquet"):  # without listing thousands of steps
        step = int(match[1])
        label = SAMPLES_LABEL if source.task == "evaluate" else f"step {step}"
        yield EpisodeFile(source, source.attempt.episodes_path(step), label, step)
    else:
        yield from (file for file in list_files(source) if file.path.stem == name)


def _set_document(found: EpisodeSet, vocabulary: Sequence[tuple[str, bool]]) -> dict[str, Any]:
    return {
        "total": found.total,
        "embedded": found.embedded,
        "vocabulary": vocabulary,
        "groups": json.loads(found.json),
    }
