"""Sets of episodes that a page lists first and reads later, one at a time."""

import json
import os
import re
from collections.abc import Sequence
from typing import Any

from perilune.errors import RequestError
from perilune.ui.attempt import Attempt
from perilune.ui.episodes import (
    EpisodeLibrary,
    EpisodeSet,
    Source,
    StageEpisodes,
    Tokenizers,
    embed,
    files_of,
)
from perilune.ui.traces import TRACES, WRITES_TRACES, traces_of

STEP_FILE = re.compile(r"step-(\d+)\.parquet")
BUDGET = 3_000_000  # characters of JSON of one set


def index_episodes(sources: Sequence[Source]) -> EpisodeLibrary:
    """All sets of all sources, without their episodes. Reads no episode."""
    library = EpisodeLibrary()
    for source in sources:
        sets: list[EpisodeSet] = []
        steps: list[int] = []
        if source.task in WRITES_TRACES:
            sets = [
                EpisodeSet(label, step, 0, 0, None, "", label)
                for step, (label, file) in enumerate(TRACES.items())
                if source.attempt.has(f"artifacts/traces/{file}")
            ]
        else:
            steps = steps_of(source.attempt)
            if source.task == "evaluate":
                parts = ((file.label, file.step, file.path.stem) for file in files_of(source))
                sets, steps = (
                    [EpisodeSet(label, step, 0, 0, None, "", name) for label, step, name in parts],
                    [],
                )
        if sets or steps:
            library.stages.append(StageEpisodes(source.stage, source.task, None, sets, [], steps))
    return library


def steps_of(attempt: Attempt) -> list[int]:
    """The steps whose episodes are there."""
    if attempt.root is None:
        return []
    try:
        names = os.listdir(attempt.root / "artifacts" / "episodes")  # noqa: PTH208 a path for each is slow
    except OSError:
        return []
    return sorted(int(found[1]) for name in names if (found := STEP_FILE.fullmatch(name)))


def read_set(sources: Sequence[Source], stage: str, name: str) -> dict[str, Any]:
    """One set: its groups, the texts of its tokens, and how many of its episodes these are.

    Raises:
        RequestError: when the stage has no such set.
    """
    source = next((one for one in sources if one.stage == stage), None)
    if source is not None and source.task in WRITES_TRACES:
        traces = traces_of(stage, source.attempt)
        for one in traces.sets if traces else ():
            if one.label == name:
                return _document(one, [])
    for file in files_of(source) if source is not None else ():
        if file.path.stem == name:
            tokenizers = Tokenizers(sources)
            episodes = file.source.attempt.episodes(file.path)
            vocabulary = tokenizers.find(stage, episodes)
            found, _ = embed(file, episodes, vocabulary, BUDGET)
            return _document(found, [] if vocabulary is None else vocabulary.table)
    raise RequestError(f"stage {stage} has no episodes called {name}")


def _document(found: EpisodeSet, vocabulary: Sequence[tuple[str, bool]]) -> dict[str, Any]:
    return {
        "total": found.total,
        "embedded": found.embedded,
        "vocabulary": vocabulary,
        "groups": json.loads(found.json),
    }
