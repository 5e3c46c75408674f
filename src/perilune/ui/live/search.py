"""Searches the episodes of a stage or the attempts at one task, and reports matches while it searches."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from perilune.data.episodes_file import read_columns
from perilune.ui.episodes import RIGHT_REWARD, EpisodeFile, EpisodeSource, list_files
from perilune.ui.live.episode_index import EpisodeIndex, Outline
from perilune.ui.turns import ASSISTANT, shorten

REPORT_INTERVAL_S = 0.3
MAX_CHARACTERS = 400  # characters of a prompt or an answer in a row
TEXT_COLUMNS = ["text", "messages", "failure", "task_id", "episode_id"]

Mask = NDArray[np.bool_]
Index = Callable[[EpisodeSource], EpisodeIndex]


class Filters(BaseModel):
    """The search conditions, named as in the page. All words of `q` must occur."""

    q: str = Field("", max_length=400)
    reward: Literal["any", "right", "partial", "wrong", "failed"] = "any"
    strategy: str = ""
    finish: str = ""
    group: str = ""
    least: float = 0
    most: float = float("inf")
    sort: Literal["", "reward", "-reward", "-advantage", "length", "-length", "logprob"] = ""
    rows: int = Field(60, ge=1, le=5000)


def search(source: EpisodeSource, index: EpisodeIndex, filters: Filters) -> Iterator[dict[str, Any]]:
    """Search the files in order of step.

    Yields:
        Reports with the first `rows`, the number of episodes `found`, and the numbers of files: `searched` so
        far, `of` all, and `unreadable`. The last report covers all files.
    """
    sets = list(list_files(source))
    found: list[Outline] = []
    known: dict[tuple[int, int], dict[str, Any]] = {}
    clock = _ReportTimer()
    for part, searched in _match_parts(sets, index, filters):
        if part is not None and len(part.rows):
            found.append(part)
        if searched == len(sets) or clock.is_due():
            rows = _list_rows(sets, index, _sort_found(found, filters), known)
            done = {"searched": searched, "of": len(sets), "unreadable": index.unreadable(searched)}
            yield {"rows": rows, "found": sum(len(outline.rows) for outline in found), **done}


def _match_parts(
    sets: Sequence[EpisodeFile], index: EpisodeIndex, filters: Filters
) -> Iterator[tuple[Outline | None, int]]:
    """Yield matching episodes, or None without any, and the number of files searched so far."""
    words = filters.q.split()
    outline, done = None, 0
    while done < len(sets):
        before = done
        outline, done = index.read(sets, done)
        if outline is not None:
            outline = outline.at(_match_filters(outline, index, filters))
        if not words or outline is None:
            yield outline, done
            continue
        starts = np.searchsorted(outline.files, np.arange(before, done + 1))
        for position, (start, end) in enumerate(pairwise(starts.tolist()), before):
            part = None
            if start < end:
                episodes = outline.at(np.arange(start, end))
                part = episodes.at(_match_words(sets[position].path, words)[episodes.rows])
            yield part, position + 1
    if not sets:
        yield None, 0


def find_attempts(task: str, sources: Sequence[EpisodeSource], index_of: Index) -> Iterator[dict[str, Any]]:
    """Search all stages for the episodes of one task.

    Yields:
        Reports with the new `attempts`, one for each step with the task, and the numbers of files: `searched`
        so far and `of` all. The last report covers all files.
    """
    listed = [(source, index_of(source), list(list_files(source))) for source in sources]
    total = sum(len(sets) for *_, sets in listed)
    searched = 0
    attempts: list[dict[str, Any]] = []
    clock = _ReportTimer()
    for source, index, sets in listed:
        done = 0
        while done < len(sets):
            before = done
            outline, done = index.read(sets, done)
            searched += done - before
            if outline is not None:
                found = outline.at(outline.tasks == index.tasks.get(task, -1))
                attempts += _group_attempts(source.stage, sets, found)
            if searched == total or clock.is_due():
                yield {"attempts": attempts, "searched": searched, "of": total}
                attempts = []
    if not total:
        yield {"attempts": [], "searched": 0, "of": 0}


def _group_attempts(stage: str, sets: Sequence[EpisodeFile], found: Outline) -> Iterator[dict[str, Any]]:
    members = zip(found.files.tolist(), found.ids.to_pylist(), found.reward.tolist(), strict=True)
    for number, group in groupby(members, key=lambda member: member[0]):
        attempts = [{"id": name, "reward": reward} for _, name, reward in group]
        file = sets[number]
        place = {"stage": stage, "label": file.label, "name": file.path.stem, "step": file.step}
        yield {**place, "members": attempts}


class _ReportTimer:
    def __init__(self) -> None:
        self._next = time.monotonic() + REPORT_INTERVAL_S

    def is_due(self) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + REPORT_INTERVAL_S
        return True


def _match_filters(outline: Outline, index: EpisodeIndex, filters: Filters) -> Mask:
    fits = _match_reward(outline, filters.reward)
    fits &= (outline.length >= filters.least) & (outline.length <= filters.most)
    if filters.finish:
        fits &= outline.finish == filters.finish
    if filters.strategy:
        name = filters.strategy.removeprefix("s:")
        wanted = [
            number
            for names, number in list(index.strategies.items())
            if (name in names if filters.strategy != "none" else not names)
        ]
        fits &= np.isin(outline.strategies, wanted)
    if filters.group:
        fits &= pc.equal(outline.groups, filters.group).to_numpy(zero_copy_only=False)
    return fits


def _match_reward(outline: Outline, kind: str) -> Mask:
    reward = outline.reward
    match kind:
        case "right":
            return reward >= RIGHT_REWARD
        case "partial":
            return (reward > 0) & (reward < RIGHT_REWARD)
        case "wrong":
            return reward <= 0
        case "failed":
            return outline.failed.copy()
    return np.ones(len(reward), np.bool_)


def _match_words(path: Path, words: Sequence[str]) -> Mask:
    """Return a mask of the file's episodes whose texts, ids or failure contain all words; ignores case."""
    table = read_columns(path, TEXT_COLUMNS).combine_chunks()
    messages = table["messages"].chunk(0)
    owners = np.repeat(np.arange(len(table)), np.diff(messages.offsets.to_numpy()))
    contents = pc.struct_field(messages.values, "content")
    fits = np.ones(len(table), np.bool_)
    for word in words:
        has = np.zeros(len(table), np.bool_)
        has[owners[_contains(contents, word)]] = True
        for name in TEXT_COLUMNS:
            if name != "messages":
                has |= _contains(table[name].chunk(0), word)
        fits &= has
    return fits


def _contains(texts: pa.Array, word: str) -> Mask:
    found = pc.match_substring(texts, word, ignore_case=True)
    return pc.fill_null(found, False).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _sort_found(found: Sequence[Outline], filters: Filters) -> Outline | None:
    """Return the first `filters.rows` episodes in the order of `filters.sort`; unknown values come last."""
    if not found:
        return None
    if not filters.sort:
        totals = list(accumulate(len(outline.rows) for outline in found))
        needed = bisect_left(totals, filters.rows) + 1
        return Outline.joined(found[:needed]).at(np.arange(min(filters.rows, totals[-1])))
    name = filters.sort.removeprefix("-")
    keys = np.concatenate([getattr(outline, name) for outline in found])
    order = np.argsort(-keys if filters.sort.startswith("-") else keys, kind="stable")[: filters.rows]
    starts = np.cumsum([0, *(len(outline.rows) for outline in found)])
    owners = np.searchsorted(starts, order, side="right") - 1
    chosen = [
        found[owner].at(np.array([index - starts[owner]])) for owner, index in zip(owners, order, strict=True)
    ]
    return Outline.joined(chosen)


def _list_rows(
    sets: Sequence[EpisodeFile],
    index: EpisodeIndex,
    chosen: Outline | None,
    known: dict[tuple[int, int], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return rows of the list. Adds the rows that it reads to `known`."""
    if chosen is None:
        return []
    keys = list(zip(chosen.files.tolist(), chosen.rows.tolist(), strict=True))
    missing = [i for i, key in enumerate(keys) if key not in known]
    for number, group in groupby(sorted(missing, key=lambda i: keys[i]), key=lambda i: keys[i][0]):
        for i, row in _read_rows(sets[number], index, chosen, list(group)):
            known[keys[i]] = row
    return [known[key] for key in keys]


def _read_rows(
    file: EpisodeFile, index: EpisodeIndex, chosen: Outline, wanted: Sequence[int]
) -> Iterator[tuple[int, dict[str, Any]]]:
    strategies = {number: sorted(names) for names, number in list(index.strategies.items())}
    texts = read_columns(file.path, TEXT_COLUMNS).take(chosen.rows[list(wanted)]).to_pylist()
    for i, text in zip(wanted, texts, strict=True):
        opening = [message["content"] for message in _opening(text["messages"])]
        yield (
            i,
            {
                "step": file.step,
                "id": text["episode_id"],
                "group": {"id": chosen.groups[i].as_py(), "task": text["task_id"]},
                "prompt": shorten("\n".join(opening).strip().rpartition("\n")[2], MAX_CHARACTERS),
                "text": shorten(text["text"] or "", MAX_CHARACTERS),
                "failure": text["failure"] or "",
                "reward": float(chosen.reward[i]),
                "advantage": float(chosen.advantage[i]),
                "length": int(chosen.length[i]),
                "finish": str(chosen.finish[i]),
                "strategies": strategies.get(int(chosen.strategies[i]), []),
            },
        )


def _opening(messages: Sequence[dict[str, str]]) -> Sequence[dict[str, str]]:
    """Return the messages before the first answer."""
    roles = [message["role"] for message in messages]
    return messages[: roles.index(ASSISTANT)] if ASSISTANT in roles else messages
