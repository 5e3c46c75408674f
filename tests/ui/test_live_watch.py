"""The event stream of the live page, without a browser."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from make_experiment import SyntheticExperiment
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from perilune.control.record.home import Home
from perilune.control.runs.experiments import Control
from perilune.files import append_json_line, write_json
from perilune.ui.attempt import Attempt
from perilune.ui.episode_sets import index_episodes, read_set
from perilune.ui.episodes import EpisodeSource
from perilune.ui.live import followed, watch
from perilune.ui.live.access import Access
from perilune.ui.live.app import _parse_offsets, make_app
from perilune.ui.live.followed import CHUNK_BYTES, StageFollower, read_appended
from perilune.ui.live.watch import Watch, file_offsets


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll every file on every pass."""
    monkeypatch.setattr(followed, "JUDGE_INTERVAL_FACTOR", 0)
    monkeypatch.setattr(watch, "REFRESH_INTERVAL_S", 0)


def poll_events(reader: Watch) -> dict[str, Any]:
    return {event.kind: json.loads(event.encode().partition("data: ")[2]) for event in reader.poll()}


def test_watch_sends_only_new_lines_and_resumes_from_offsets(tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    root = made.rl(steps=9, prompts=1, until=3)
    reader = Watch(made.view, file_offsets(made.view()))
    first = poll_events(reader)
    assert first.keys() == {"status"}
    assert first["status"]["progress"][0]["done"] == 3
    metrics = root / "artifacts" / "metrics.jsonl"
    append_json_line(metrics, {"step": 4, "reward": 0.5})
    with metrics.open("a") as stream:
        stream.write('{"step": 5, "rew')  # an incomplete line
    (root / "artifacts" / "episodes" / "step-000004.parquet").write_bytes(b"")
    events = list(reader.poll())
    assert [event.kind for event in events] == ["steps", "status"]
    assert events[0].data["metrics"] == [{"step": 4, "reward": 0.5}]
    assert events[0].data["episodes"] == [4]
    with metrics.open("a") as stream:
        stream.write('ard": 0.75}\n')
    offsets = json.loads(events[0].encode().partition("id: ")[2].partition("\n")[0])
    assert poll_events(Watch(made.view, offsets))["steps"]["metrics"] == [{"step": 5, "reward": 0.75}]
    assert poll_events(reader)["steps"]["metrics"] == [{"step": 5, "reward": 0.75}]
    assert poll_events(reader) == {}


def test_watch_computes_tokens_per_second_of_new_steps(tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    root = made.rl(steps=9, prompts=1, until=4)
    reader = Watch(made.view, file_offsets(made.view()))
    poll_events(reader)
    timing = {"step": 5, "tokens": 300, "learning": 0.5, "other": 0.25, "tokens_per_second": 0.0}
    append_json_line(root / "artifacts" / "timings.jsonl", timing)
    assert poll_events(reader)["steps"]["timings"] == [timing | {"tokens_per_second": 400.0}]


def test_watch_reports_failed_stage(tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    root = made.rl(steps=9, prompts=1, until=2)
    reader = Watch(made.view, {})
    poll_events(reader)
    made.fail(root, "no space is left on the disk", 3.0)
    events = poll_events(reader)
    assert events["changed"] == {}
    health = events["status"]["health"][0]
    assert (health["status"], health["findings"][0]["name"]) == ("broken", "failed")
    assert health["findings"][0]["why"] == "no space is left on the disk"


def test_appended_skips_hostile_and_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    deep = "[" * 100_000
    path.write_bytes(b'{"step": 1}\n[1]\nnull\n\xff\xfe\n' + deep.encode() + b'\n{"step": 2}\n{"step"')
    rows, offset = read_appended(path, 0)
    assert rows == [{"step": 1}, {"step": 2}]
    assert offset == path.stat().st_size - len('{"step"')
    path.write_bytes(b"x" * (CHUNK_BYTES + 10) + b'\n{"step": 3}\n')
    assert read_appended(path, 0) == ([], CHUNK_BYTES)  # a line longer than CHUNK is skipped in chunks
    assert read_appended(path, CHUNK_BYTES)[0] == [{"step": 3}]
    path.write_bytes(b'{"step": 9}\n')
    assert read_appended(path, 10_000)[0] == [{"step": 9}]  # the file was replaced
    os.mkfifo(tmp_path / "pipe")
    assert read_appended(tmp_path / "pipe", 7) == ([], 7)
    assert read_appended(tmp_path / "missing", 7) == ([], 7)


def test_episode_sets_are_listed_unread_and_read_by_name(tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    made.collect(40)
    root = made.rl(steps=3, prompts=2)
    (root / "artifacts" / "episodes" / "step-000009.parquet").write_bytes(b"damaged")
    sources = [EpisodeSource(s.name, s.task, Attempt(s.attempt_dir)) for s in made.view().stages]
    listed = index_episodes(sources)
    assert [([episode_set.name for episode_set in stage.sets], stage.steps) for stage in listed.stages] == [
        (["verified traces"], []),
        ([], [1, 2, 3, 9]),
    ]
    document = read_set(sources, "rl", "step-000002")
    assert (document["total"], document["embedded"], len(document["groups"])) == (16, 16, 2)
    pieces = document["groups"][0]["episodes"][0]["tokens"]
    assert "".join(document["vocabulary"][piece][0] for piece in pieces).endswith("<eos>")
    assert read_set(sources, "traces", "verified traces")["total"] == 40
    assert read_set(sources, "rl", "step-000009")["groups"] == []


def test_watch_reports_what_changed_before_the_stream_began(tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    root = made.rl(steps=9, prompts=1, until=3)
    offsets = file_offsets(made.view())
    append_json_line(root / "artifacts" / "metrics.jsonl", {"step": 4, "reward": 0.5})
    (root / "artifacts" / "episodes" / "step-000004.parquet").write_bytes(b"")
    made.fail(root, "no space is left on the disk", 3.0)
    events = poll_events(Watch(made.view, offsets))
    assert events["changed"] == {}
    assert events["steps"]["episodes"] == [4]
    assert "changed" not in poll_events(Watch(made.view, file_offsets(made.view())))


def test_follower_reads_files_that_are_written_later(tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    root = made.rl(steps=9, prompts=1, until=3)
    (root / "artifacts" / "precheck.json").unlink()
    follower = StageFollower(made.view().stages[0])
    follower.read_new()
    follower.health(0.0)
    write_json(root / "artifacts" / "precheck.json", {"torch": {"cuda": "12.8"}})
    for step in (4, 5):  # differences that are rounding on a GPU, and not on a processor
        append_json_line(root / "artifacts" / "metrics.jsonl", {"step": step, "logprob_gap_max": 0.005})
    follower.read_new()
    assert follower.health(0.0)[0].findings == ()


def test_cookies_of_other_servers_do_not_hide_the_token() -> None:
    access = Access(PlainTextResponse("inside"), token="a-token-of-enough-characters")
    client = TestClient(access, follow_redirects=False)
    client.post("/token", data={"token": "a-token-of-enough-characters"})
    cookies = f'other={{"a": 1}}; perilune={client.cookies["perilune"]}'
    client.cookies.clear()
    assert client.get("/", headers={"cookie": cookies}).text == "inside"
    assert client.get("/", headers={"cookie": "perilune=x"}).status_code == 401


def test_malformed_offsets_count_as_none() -> None:
    for text in ("[", "[1]", '{"rl": 1}', '{"rl": [1e999]}'):
        assert _parse_offsets(text) == {}


def test_comparison_of_too_many_experiments_is_refused(tmp_path: Path) -> None:
    client = TestClient(make_app(Control(Home.open(tmp_path)), None), base_url="http://localhost")
    refused = client.get(f"/compare/{','.join(['a'] * 33)}")
    assert refused.status_code == 404
    assert refused.json()["error"] == "33 experiments are selected, but a page compares 32"
