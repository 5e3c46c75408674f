"""An index of the episodes of a stage for searches. Each file is read once, without texts and tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from perilune.data.episodes_file import read_columns
from perilune.errors import RequestError
from perilune.ui.episodes import EpisodeFile, EpisodeSource

COLUMNS = ["episode_id", "group_id", "task_id", "reward", "failure", "finish_reason", "metrics", "logprobs"]
STRATEGY_PREFIX = "strategy/"  # begins the names of metrics
UNKNOWN = np.nan
MAX_INDEXES = 16
MAX_PENDING_FILES = 64  # pending outlines above which they are joined


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """Some episodes, one element each, in order of step.

    Attributes:
        files: indices of the episodes' files, in order of step.
        rows: rows in these files.
        tasks: numbers in `EpisodeIndex.tasks`.
        strategies: numbers in `EpisodeIndex.strategies`.
        logprob: mean log-prob of the policy's tokens, in nats. Unknown rewards and advantages are NaN.
    """

    files: NDArray[np.int32]
    rows: NDArray[np.int32]
    ids: pa.Array
    groups: pa.Array
    tasks: NDArray[np.int32]
    strategies: NDArray[np.int32]
    reward: NDArray[np.float64]
    advantage: NDArray[np.float64]
    length: NDArray[np.int32]
    logprob: NDArray[np.float32]
    failed: NDArray[np.bool_]
    finish: NDArray[np.str_]

    def at(self, chosen: NDArray[Any]) -> Outline:
        """Return the outline of the chosen episodes, given as indices or a mask."""
        indices = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        columns = (getattr(self, field.name) for field in fields(self))
        return Outline(*(column.take(indices) for column in columns))

    @staticmethod
    def joined(parts: Sequence[Outline]) -> Outline:
        columns = ([getattr(part, field.name) for part in parts] for field in fields(Outline))
        return Outline(
            *(
                pa.concat_arrays(column) if isinstance(column[0], pa.Array) else np.concatenate(column)
                for column in columns
            )
        )


class EpisodeIndex:
    """The outlines of the episode files of one attempt. Reads a file when a search first needs it.

    A million episodes take about 200 MB.

    Attributes:
        tasks: numbers of tasks, by task id.
        strategies: numbers of sets of strategies.
    """

    def __init__(self) -> None:
        self.tasks: dict[str, int] = {}
        self.strategies: dict[frozenset[str], int] = {}
        self._joined: Outline | None = None  # outline of the first `_joined_count` files
        self._joined_count = 0
        self._pending: list[Outline | None] = []  # outlines of the following files
        self._unreadable: list[int] = []
        self._lock = Lock()  # requests come in threads

    def read(self, episode_files: Sequence[EpisodeFile], done: int) -> tuple[Outline | None, int]:
        """Return the outline of the files after the first `done`, and the number of files read then.

        Joined files are returned together. New files must come at the end of `episode_files`.
        """
        with self._lock:
            if done == 0 and len(self._pending) > MAX_PENDING_FILES:
                self._join_pending()
            if done < self._joined_count:
                outline = self._joined
                if outline is not None and done:  # joined by another search meanwhile
                    outline = outline.at(outline.files >= done)
                return outline, self._joined_count
            while len(self._pending) <= done - self._joined_count:
                place = self._joined_count + len(self._pending)
                self._pending.append(self._read_outline(episode_files[place].path, place))
            return self._pending[done - self._joined_count], done + 1

    def unreadable(self, done: int) -> int:
        """Return the number of unreadable files among the first `done`."""
        return bisect_left(self._unreadable, done)

    def _join_pending(self) -> None:
        known = [part for part in (self._joined, *self._pending) if part is not None]
        self._joined = Outline.joined(known) if known else None
        self._joined_count += len(self._pending)
        self._pending = []

    def _read_outline(self, path: Path, place: int) -> Outline | None:
        try:
            table = read_columns(path, [*COLUMNS, "loss_mask"]).combine_chunks()
        except RequestError:
            self._unreadable.append(place)
            return None
        if not len(table) or table.num_columns <= len(COLUMNS):
            return None
        column = {name: table[name].chunk(0) for name in table.column_names}
        advantage, strategies = self._read_metrics(column["metrics"])
        length, logprob = _measure_lengths(column["logprobs"], column["loss_mask"])
        return Outline(
            files=np.full(len(table), place, np.int32),
            rows=np.arange(len(table), dtype=np.int32),
            ids=column["episode_id"],
            groups=column["group_id"],
            tasks=self._number_tasks(column["task_id"]),
            strategies=strategies,
            reward=pc.fill_null(column["reward"], UNKNOWN).to_numpy(),
            advantage=advantage,
            length=length,
            logprob=logprob,
            failed=pc.not_equal(pc.fill_null(column["failure"], ""), "").to_numpy(zero_copy_only=False),
            finish=np.array(column["finish_reason"].to_pylist(), "U7"),
        )

    def _number_tasks(self, tasks: pa.Array) -> NDArray[np.int32]:
        names = tasks.to_pylist()
        return np.array([self.tasks.setdefault(name, len(self.tasks)) for name in names], np.int32)

    def _read_metrics(self, metrics: pa.MapArray) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """Return the advantages, and the numbers of the sets of strategies."""
        rows = np.repeat(np.arange(len(metrics)), np.diff(metrics.offsets.to_numpy()))
        names, values = metrics.keys, metrics.items.to_numpy(zero_copy_only=False)
        advantage = np.full(len(metrics), UNKNOWN)
        is_advantage = pc.equal(names, "advantage").to_numpy(zero_copy_only=False)
        advantage[rows[is_advantage]] = values[is_advantage]
        used = pc.starts_with(names, STRATEGY_PREFIX).to_numpy(zero_copy_only=False) & (values > 0)
        by_row: list[set[str]] = [set() for _ in range(len(metrics))]
        for index in np.flatnonzero(used):
            by_row[rows[index]].add(names[index].as_py().removeprefix(STRATEGY_PREFIX))
        numbers = [self.strategies.setdefault(frozenset(row), len(self.strategies)) for row in by_row]
        return advantage, np.array(numbers, np.int32)


class IndexCache:
    """The indexes of the `MAX_INDEXES` attempts that were searched last."""

    def __init__(self) -> None:
        self._found: dict[Path | None, EpisodeIndex] = {}

    def of(self, source: EpisodeSource) -> EpisodeIndex:
        index = self._found.pop(source.attempt.root, None) or EpisodeIndex()
        self._found[source.attempt.root] = index  # the latest is last
        while len(self._found) > MAX_INDEXES:
            self._found.pop(next(iter(self._found)), None)
        return index


def _measure_lengths(
    logprobs: pa.ListArray, masks: pa.ListArray
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the number of tokens, and the mean log-prob of those that the policy sampled."""
    offsets = logprobs.offsets.to_numpy()
    sampled = masks.values.to_numpy(zero_copy_only=False).astype(np.float64)
    total = np.concatenate([[0.0], np.cumsum(logprobs.values.to_numpy() * sampled)])
    count = np.concatenate([[0.0], np.cumsum(sampled)])
    mean = np.diff(total[offsets]) / np.maximum(1.0, np.diff(count[offsets]))
    return np.diff(offsets).astype(np.int32), mean.astype(np.float32)
