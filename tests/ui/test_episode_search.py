"""Search over all episodes of a stage, and all attempts at one task, read from episode files."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from make_experiment import SyntheticExperiment

from perilune.data.episode import Episode
from perilune.data.episodes_file import read_episodes, write_episodes
from perilune.ui.attempt import Attempt
from perilune.ui.episodes import EpisodeSource
from perilune.ui.live import episode_index, search
from perilune.ui.live.episode_index import EpisodeIndex, IndexCache
from perilune.ui.live.search import Filters, find_attempts

STEPS = 6
SHARED = "the shared task"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> EpisodeSource:
    """An RL stage whose steps 2, 3 and 6 share one task with a mixed-case prompt."""
    root = SyntheticExperiment(tmp_path_factory.mktemp("home")).rl(steps=STEPS, prompts=3, until=STEPS)
    for step in (2, 3, 6):
        path = root / "artifacts" / "episodes" / f"step-{step:06d}.parquet"
        episodes = read_episodes(path)
        asked = ({"role": "user", "content": "What is Ω, PLEASE?"}, episodes[0].messages[1])
        episodes[:8] = [replace(one, task_id=SHARED, messages=asked) for one in episodes[:8]]
        write_episodes(path, episodes)
    return EpisodeSource("rl", "rl", Attempt(root))


@pytest.fixture(scope="module")
def episodes(source: EpisodeSource) -> list[tuple[int, Episode]]:
    files = source.attempt.episode_files
    return [(step, one) for step, path in enumerate(files, 1) for one in read_episodes(path)]


def last_result(source: EpisodeSource, index: EpisodeIndex | None = None, **given: Any) -> dict[str, Any]:
    """The final result of a search."""
    *_, last = search.search(source, index or EpisodeIndex(source.attempt), Filters(rows=5000, **given))
    return last


CASES: list[tuple[dict[str, Any], Callable[[Episode], bool]]] = [
    ({}, lambda one: True),
    ({"reward": "right"}, lambda one: one.reward is not None and one.reward >= 1),
    ({"reward": "wrong"}, lambda one: one.reward is not None and one.reward <= 0),
    ({"reward": "failed"}, lambda one: bool(one.failure)),
    ({"finish": "length"}, lambda one: one.finish_reason == "length"),
    ({"strategy": "s:direct"}, lambda one: "strategy/direct" in one.metrics),
    ({"strategy": "none"}, lambda one: not any(name.startswith("strategy/") for name in one.metrics)),
    ({"group": "4/1"}, lambda one: one.group_id == "4/1"),
    ({"least": 10, "most": 20}, lambda one: 10 <= len(one.token_ids) <= 20),
    ({"q": "please ω"}, lambda one: one.task_id == SHARED),
    ({"q": "please", "reward": "right"}, lambda one: one.task_id == SHARED and one.reward == 1),
    ({"q": "no such word"}, lambda one: False),
]


@pytest.mark.parametrize(("given", "fits"), CASES)
def test_search_matches_scan_of_all_episodes(
    source: EpisodeSource,
    episodes: list[tuple[int, Episode]],
    given: dict[str, Any],
    fits: Callable[[Episode], bool],
) -> None:
    told = last_result(source, **given)
    wanted = [(step, one.episode_id) for step, one in episodes if fits(one)]
    assert [(row["step"], row["id"]) for row in told["rows"]] == wanted
    assert told["found"] == len(wanted)
    assert (told["searched"], told["of"]) == (STEPS, STEPS)


def test_search_rows_hold_the_fields_of_the_list(
    source: EpisodeSource, episodes: list[tuple[int, Episode]]
) -> None:
    told = last_result(source, q="please")["rows"]
    by_id = {one.episode_id: one for _, one in episodes}
    assert told
    for row in told:
        one = by_id[row["id"]]
        assert (row["text"], row["prompt"], row["finish"]) == (
            one.text,
            "What is Ω, PLEASE?",
            one.finish_reason,
        )
        assert row["group"] == {"id": one.group_id, "task": SHARED}
        assert row["length"] == len(one.token_ids)
        assert row["advantage"] == pytest.approx(one.metrics.get("advantage", 0.0))
        assert row["strategies"] == [name[9:] for name in one.metrics if name.startswith("strategy/")]


@pytest.mark.parametrize("sort", ["reward", "-reward", "-advantage", "length", "-length", "logprob"])
def test_sorted_search_returns_the_top_rows_of_all_episodes(
    source: EpisodeSource, episodes: list[tuple[int, Episode]], sort: str
) -> None:
    values: dict[str, Callable[[Episode], float | None]] = {
        "reward": lambda one: one.reward,
        "advantage": lambda one: one.metrics.get("advantage"),
        "length": lambda one: len(one.token_ids),
        "logprob": lambda one: round(float(one.logprobs.mean()), 5),
    }
    value = values[sort.removeprefix("-")]
    sign = -1 if sort.startswith("-") else 1
    known = sorted(sign * number for _, one in episodes if (number := value(one)) is not None)
    *_, told = search.search(source, EpisodeIndex(source.attempt), Filters(sort=sort, rows=20))
    by_id = {one.episode_id: one for _, one in episodes}
    shown = [sign * (value(by_id[row["id"]]) or 0.0) for row in told["rows"]]
    assert shown == pytest.approx(known[:20])
    assert told["found"] == len(episodes)


def test_search_covers_merged_files(
    source: EpisodeSource, episodes: list[tuple[int, Episode]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_index, "MAX_PENDING_FILES", 2)
    index = EpisodeIndex(source.attempt)
    sets = list(episode_index.list_sets(source))
    for place in range(4):
        index.read(sets, place)
    assert index.read(sets, 0)[1] == 4  # the index merged four files
    wanted = [one.episode_id for _, one in episodes if one.task_id == SHARED]
    assert [row["id"] for row in last_result(source, index, q="please")["rows"]] == wanted
    ordered = last_result(source, index, q="please", least=1, sort="length")["rows"]
    assert sorted(row["id"] for row in ordered) == sorted(wanted)
    part, done = index.read(sets, 3)  # a search at the fourth file when the merge happened
    assert part is not None
    assert (done, set(part.files.tolist())) == (4, {3})
    told = find_attempts(SHARED, [source], lambda _: index)
    assert [attempt["step"] for news in told for attempt in news["attempts"]] == [2, 3, 6]


def test_search_reports_progress_after_each_step(
    source: EpisodeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "REPORT_INTERVAL_S", 0.0)
    told = list(search.search(source, EpisodeIndex(source.attempt), Filters(reward="right", rows=5000)))
    assert [(one["searched"], one["of"]) for one in told] == [(step, STEPS) for step in range(1, STEPS + 1)]
    counts = [one["found"] for one in told]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1]
    assert all(row["step"] <= one["searched"] for one in told for row in one["rows"])


def test_attempts_at_task_come_from_all_steps_and_stages(source: EpisodeSource, tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    root = made.rl(steps=1, prompts=1)
    path = root / "artifacts" / "episodes" / "step-000001.parquet"
    write_episodes(path, [replace(one, task_id=SHARED) for one in read_episodes(path)])
    sources = [source, EpisodeSource("again", "rl", Attempt(root))]
    told = list(find_attempts(SHARED, sources, IndexCache().of))
    attempts = [attempt for news in told for attempt in news["attempts"]]
    assert [(one["stage"], one["label"], len(one["members"])) for one in attempts] == [
        ("rl", "step 2", 8),
        ("rl", "step 3", 8),
        ("rl", "step 6", 8),
        ("again", "step 1", 8),
    ]
    first = read_episodes(source.attempt.episodes_path(2))[:8]
    assert [one["id"] for one in attempts[0]["members"]] == [one.episode_id for one in first]
    assert (told[-1]["searched"], told[-1]["of"]) == (STEPS + 1, STEPS + 1)


def test_index_reads_each_file_once_and_picks_up_new_files(
    source: EpisodeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted(path: Path, columns: list[str]) -> Any:
        read.append(path.stem)
        return kept(path, columns)

    kept = episode_index.read_columns
    monkeypatch.setattr(episode_index, "read_columns", counted)
    root = SyntheticExperiment(tmp_path).rl(steps=3, prompts=1, until=2)
    mine, indexes = EpisodeSource("rl", "rl", Attempt(root)), IndexCache()
    for steps, told in ((2, ["step-000001", "step-000002"]), (3, ["step-000003"])):
        assert last_result(mine, indexes.of(mine))["of"] == steps
        assert last_result(mine, indexes.of(mine), reward="right")["searched"] == steps
        assert read == told
        read.clear()
        write_episodes(mine.attempt.episodes_path(3), read_episodes(mine.attempt.episodes_path(2)))


def test_search_counts_damaged_files_and_accepts_missing_ones(tmp_path: Path) -> None:
    root = SyntheticExperiment(tmp_path).rl(steps=3, prompts=1, until=2)
    mine = EpisodeSource("rl", "rl", Attempt(root))
    mine.attempt.episodes_path(1).write_bytes(b"damaged")
    told = last_result(mine)
    assert (told["found"], told["searched"], told["of"], told["unreadable"]) == (8, 2, 2, 1)
    assert last_result(EpisodeSource("none", "rl", Attempt(None)))["of"] == 0


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Turn numpy warnings about missing values into errors."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield
