"""Statistics of data files: counts, lengths, scores, duplicates, and tasks that files share."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from perilune.data.episode import Episode
from perilune.data.episodes_file import read_episodes
from perilune.data.records import TraceRecord, deduplicate, read_records
from perilune.data.similarity import detect_language

HISTOGRAM_BINS = 12


def inspect_files(paths: Sequence[Path], *, languages: bool = False) -> dict[str, Any]:
    """Figures of each file, and the number of tasks that each pair of files shares (0 for clean splits).

    A .parquet file contains episodes; all other files contain trace records.

    Args:
        languages: also guess the language of each answer.

    Raises:
        RequestError: when a file is missing or broken, or the package for languages is missing.
    """
    files, tasks = [], {}
    for path in paths:
        rows: Sequence[Episode | TraceRecord]
        if path.suffix == ".parquet":
            episodes = rows = read_episodes(path)
            figures = _summarize_episodes(episodes)
        else:
            records = rows = read_records(path)
            figures = _summarize_records(records)
        if languages:
            figures["languages"] = _count_values(detect_language(_answer(row)) for row in rows)
        files.append({"file": str(path)} | figures | {"histograms": _histograms(rows)})
        tasks[str(path)] = {(row.environment, row.task_id) for row in rows}
    shared = [{"files": [a, b], "tasks": len(tasks[a] & tasks[b])} for a, b in combinations(tasks, 2)]
    return {"files": files, "shared_tasks": shared}


def _summarize_records(records: Sequence[TraceRecord]) -> dict[str, Any]:
    repeated = Counter(record.digest for record in records)
    return {
        "kind": "records",
        "rows": len(records),
        "tasks": len({(record.environment, record.task_id) for record in records}),
        "environments": _count_values(record.environment for record in records),
        "sources": _count_values(record.source for record in records),
        "score": _min_mean_max(record.score for record in records),
        "prompt_characters": _min_mean_max(_characters(record.messages[:-1]) for record in records),
        "answer_characters": _min_mean_max(len(record.answer) for record in records),
        "duplicates": {
            "content": len(records) - len(repeated),
            "content_or_task": len(records) - sum(1 for _ in deduplicate(records)),
        },
    }


def _summarize_episodes(episodes: Sequence[Episode]) -> dict[str, Any]:
    strategies = (name for episode in episodes for name in episode.metrics if name.startswith("strategy/"))
    return {
        "kind": "episodes",
        "rows": len(episodes),
        "tasks": len({(episode.environment, episode.task_id) for episode in episodes}),
        "groups": len({episode.group_id for episode in episodes}),
        "environments": _count_values(episode.environment for episode in episodes),
        "reward": _min_mean_max(episode.reward for episode in episodes if episode.reward is not None),
        "failures": _count_values(episode.failure for episode in episodes if episode.failure),
        "finish_reasons": _count_values(episode.finish_reason for episode in episodes),
        "strategies": _count_values(strategies),
        "prompt_tokens": _min_mean_max(len(episode.prompt_ids) for episode in episodes),
        "answer_tokens": _min_mean_max(len(episode.token_ids) for episode in episodes),
        "duplicates": {
            "content": len(episodes) - len({(episode.task_id, episode.text) for episode in episodes})
        },
    }


def _answer(row: Episode | TraceRecord) -> str:
    return row.text if isinstance(row, Episode) else row.answer


def _histograms(rows: Sequence[Episode | TraceRecord]) -> dict[str, dict[str, list[float]]]:
    """Histograms of answer lengths, and of scores or rewards."""
    scores = [row.reward if isinstance(row, Episode) else row.score for row in rows]
    values = {
        "answer_characters": [float(len(_answer(row))) for row in rows],
        "score": [score for score in scores if score is not None and isfinite(score)],
    }
    histograms = {}
    for name, numbers in values.items():
        if numbers:
            counts, edges = np.histogram(numbers, bins=HISTOGRAM_BINS)
            histograms[name] = {"edges": edges.tolist(), "counts": counts.tolist()}
    return histograms


def _characters(messages: Iterable[Mapping[str, str]]) -> int:
    return sum(len(message["content"]) for message in messages)


def _count_values(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))


def _min_mean_max(values: Iterable[float]) -> dict[str, float] | None:
    numbers = list(values)
    return {"min": min(numbers), "mean": fmean(numbers), "max": max(numbers)} if numbers else None
