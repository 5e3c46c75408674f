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
from perilune.ui.episodes import EpisodeSource, list_files
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
        episodes[:8] = [replace(episode, task_id=SHARED, messages=asked) for episode in episodes[:8]]
        write_episodes(path, episodes)
    return EpisodeSource("rl", "rl", Attempt(root))


@pytest.fixture(scope="module")
def episodes(source: EpisodeSource) -> list[tuple[int, Episode]]:
    files = source.attempt.episode_files
    return [(step, episode) for step, path in enumerate(files, 1) for episode in read_episodes(path)]


def last_result(source: EpisodeSource, index: EpisodeIndex | None = None, **given: Any) -> dict[str, Any]:
    """The final result of a search."""
    *_, last = search.search(source, index or EpisodeIndex(), Filters(rows=5000, **given))
    return last


CASES: list[tuple[dict[str, Any], Callable[[Episode], bool]]] = [
    ({}, lambda episode: True),
    ({"reward": "right"}, lambda episode: episode.reward is not None and episode.reward >= 1),
    ({"reward": "wrong"}, lambda episode: episode.reward is not None and episode.reward <= 0),
    ({"reward": "failed"}, lambda episode: bool(episode.failure)),
    ({"finish": "length"}, lambda episode: episode.finish_reason == "length"),
    ({"strategy": "s:direct"}, lambda episode: "strategy/direct" in episode.metrics),
    ({"strategy": "none"}, lambda episode: not any(name.startswith("strategy/") for name in episode.metrics)),
    ({"group": "4/1"}, lambda episode: episode.group_id == "4/1"),
    ({"least": 10, "most": 20}, lambda episode: 10 <= len(episode.token_ids) <= 20),
    ({"q": "please ω"}, lambda episode: episode.task_id == SHARED),
    ({"q": "please", "reward": "right"}, lambda episode: episode.task_id == SHARED and episode.reward == 1),
    ({"q": "no such word"}, lambda episode: False),
]


@pytest.mark.parametrize(("given", "fits"), CASES)
def test_search_matches_scan_of_all_episodes(
    source: EpisodeSource,
    episodes: list[tuple[int, Episode]],
    given: dict[str, Any],
    fits: Callable[[Episode], bool],
) -> None:
    result = last_result(source, **given)
    wanted = [(step, episode.episode_id) for step, episode in episodes if fits(episode)]
    assert [(row["step"], row["id"]) for row in result["rows"]] == wanted
    assert result["found"] == len(wanted)
    assert (result["searched"], result["of"]) == (STEPS, STEPS)


def test_search_rows_hold_the_fields_of_the_list(
    source: EpisodeSource, episodes: list[tuple[int, Episode]]
) -> None:
    rows = last_result(source, q="please")["rows"]
    by_id = {episode.episode_id: episode for _, episode in episodes}
    assert rows
    for row in rows:
        episode = by_id[row["id"]]
        assert (row["text"], row["prompt"], row["finish"]) == (
            episode.text,
            "What is Ω, PLEASE?",
            episode.finish_reason,
        )
        assert row["group"] == {"id": episode.group_id, "task": SHARED}
        assert row["length"] == len(episode.token_ids)
        assert row["advantage"] == pytest.approx(episode.metrics.get("advantage", 0.0))
        assert row["strategies"] == [name[9:] for name in episode.metrics if name.startswith("strategy/")]


@pytest.mark.parametrize("sort", ["reward", "-reward", "-advantage", "length", "-length", "logprob"])
def test_sorted_search_returns_the_top_rows_of_all_episodes(
    source: EpisodeSource, episodes: list[tuple[int, Episode]], sort: str
) -> None:
    values: dict[str, Callable[[Episode], float | None]] = {
        "reward": lambda episode: episode.reward,
        "advantage": lambda episode: episode.metrics.get("advantage"),
        "length": lambda episode: len(episode.token_ids),
        "logprob": lambda episode: round(float(episode.logprobs.mean()), 5),
    }
    value = values[sort.removeprefix("-")]
    sign = -1 if sort.startswith("-") else 1
    known = sorted(sign * number for _, episode in episodes if (number := value(episode)) is not None)
    *_, result = search.search(source, EpisodeIndex(), Filters(sort=sort, rows=20))
    by_id = {episode.episode_id: episode for _, episode in episodes}
    numbers = [sign * (value(by_id[row["id"]]) or 0.0) for row in result["rows"]]
    assert numbers == pytest.approx(known[:20])
    assert result["found"] == len(episodes)


def test_search_covers_merged_files(
    source: EpisodeSource, episodes: list[tuple[int, Episode]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_index, "MAX_PENDING_FILES", 2)
    index = EpisodeIndex()
    sets = list(list_files(source))
    for number in range(4):
        index.read(sets, number)
    assert index.read(sets, 0)[1] == 4  # the index merged four files
    wanted = [episode.episode_id for _, episode in episodes if episode.task_id == SHARED]
    assert [row["id"] for row in last_result(source, index, q="please")["rows"]] == wanted
    ordered = last_result(source, index, q="please", least=1, sort="length")["rows"]
    assert sorted(row["id"] for row in ordered) == sorted(wanted)
    part, done = index.read(sets, 3)  # a search at the fourth file when the merge happened
    assert part is not None
    assert (done, set(part.files.tolist())) == (4, {3})
    reports = find_attempts(SHARED, [source], lambda _: index)
    assert [attempt["step"] for news in reports for attempt in news["attempts"]] == [2, 3, 6]


def test_search_reports_progress_after_each_step(
    source: EpisodeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "REPORT_INTERVAL_S", 0.0)
    reports = list(search.search(source, EpisodeIndex(), Filters(reward="right", rows=5000)))
    assert [(r["searched"], r["of"]) for r in reports] == [(step, STEPS) for step in range(1, STEPS + 1)]
    counts = [report["found"] for report in reports]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1]
    assert all(row["step"] <= report["searched"] for report in reports for row in report["rows"])


def test_attempts_at_task_come_from_all_steps_and_stages(source: EpisodeSource, tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    root = made.rl(steps=1, prompts=1)
    path = root / "artifacts" / "episodes" / "step-000001.parquet"
    write_episodes(path, [replace(episode, task_id=SHARED) for episode in read_episodes(path)])
    sources = [source, EpisodeSource("again", "rl", Attempt(root))]
    reports = list(find_attempts(SHARED, sources, IndexCache().of))
    attempts = [attempt for news in reports for attempt in news["attempts"]]
    assert [(attempt["stage"], attempt["label"], len(attempt["members"])) for attempt in attempts] == [
        ("rl", "step 2", 8),
        ("rl", "step 3", 8),
        ("rl", "step 6", 8),
        ("again", "step 1", 8),
    ]
    first = read_episodes(source.attempt.episodes_path(2))[:8]
    assert [member["id"] for member in attempts[0]["members"]] == [episode.episode_id for episode in first]
    assert (reports[-1]["searched"], reports[-1]["of"]) == (STEPS + 1, STEPS + 1)


def test_index_reads_each_file_once_and_picks_up_new_files(
    source: EpisodeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted(path: Path, columns: list[str]) -> Any:
        read.append(path.stem)
        return original(path, columns)

    original = episode_index.read_columns
    monkeypatch.setattr(episode_index, "read_columns", counted)
    root = SyntheticExperiment(tmp_path).rl(steps=3, prompts=1, until=2)
    rl, indexes = EpisodeSource("rl", "rl", Attempt(root)), IndexCache()
    for steps, names in ((2, ["step-000001", "step-000002"]), (3, ["step-000003"])):
        assert last_result(rl, indexes.of(rl))["of"] == steps
        assert last_result(rl, indexes.of(rl), reward="right")["searched"] == steps
        assert read == names
        read.clear()
        write_episodes(rl.attempt.episodes_path(3), read_episodes(rl.attempt.episodes_path(2)))


def test_search_counts_damaged_files_and_accepts_missing_ones(tmp_path: Path) -> None:
    root = SyntheticExperiment(tmp_path).rl(steps=3, prompts=1, until=2)
    rl = EpisodeSource("rl", "rl", Attempt(root))
    rl.attempt.episodes_path(1).write_bytes(b"damaged")
    result = last_result(rl)
    assert (result["found"], result["searched"], result["of"], result["unreadable"]) == (8, 2, 2, 1)
    assert last_result(EpisodeSource("none", "rl", Attempt(None)))["of"] == 0


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Turn numpy warnings about missing values into errors."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield
