"""The commands `perilune data inspect` and `perilune data generate`."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from perilune.cli.data.records import app
from perilune.data.episode import Episode
from perilune.data.episodes_file import write_episodes
from perilune.data.records import TraceRecord, read_records, write_records
from perilune.errors import RequestError, WorkFailedError


def run(*arguments):
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def record(question, answer, task_id, source="t/direct", score=1.0):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return TraceRecord(messages, environment="e", task_id=task_id, score=score, source=source, seed=0)


def episode(index, **fields):
    values = {
        "episode_id": str(index),
        "group_id": "g",
        "task_id": "t",
        "environment": "e",
        "seed": 0,
        "messages": ({"role": "user", "content": "?"}, {"role": "assistant", "content": f"{index}"}),
        "prompt_ids": np.zeros(2, np.int32),
        "token_ids": np.zeros(index, np.int32),
        "loss_mask": np.ones(index, np.bool_),
        "logprobs": np.zeros(index, np.float32),
        "policy_version": np.zeros(index, np.int32),
        "finish_reason": "stop",
        "reward": float(index % 2),
        "metrics": {"strategy/direct": 1.0},
    }
    return Episode(**(values | fields))


@pytest.fixture
def files(tmp_path):
    rows = [record("1+1=", ";2", "a"), record("1+1=", ";2", "b"), record("3+1=", "x;4", "a", "t/long", 0.5)]
    write_records(tmp_path / "train.jsonl", rows)
    write_records(tmp_path / "validation.jsonl", [record("9+9=", ";18", "b")])
    return tmp_path / "train.jsonl", tmp_path / "validation.jsonl"


def test_inspect_plots_episodes_whose_reward_is_not_a_number(tmp_path):
    write_episodes(tmp_path / "nan.parquet", [episode(1, reward=float("nan")), episode(2)])
    assert "nan.parquet: 2 episodes" in run(tmp_path / "nan.parquet", "--plot")


def test_inspect_plots_histograms_and_counts_languages(files):
    output = run(files[0], "--plot", "--languages")
    assert "score:" in output and f"{'█' * 40} 2" in output
    assert "und 2" in output.partition("languages")[2]
    report = json.loads(run(files[0], "--json"))
    assert sum(report["files"][0]["histograms"]["answer_characters"]["counts"]) == 3


def test_inspect_summarizes_records_and_counts_shared_tasks(files):
    report = json.loads(run(*files, "--json"))
    train = report["files"][0]
    assert (train["rows"], train["tasks"]) == (3, 2)
    assert train["sources"] == {"t/direct": 2, "t/long": 1}
    assert train["score"] == {"min": 0.5, "mean": pytest.approx(2.5 / 3), "max": 1.0}
    assert train["answer_characters"] == {"min": 2, "mean": pytest.approx(7 / 3), "max": 3}
    assert train["duplicates"] == {"content": 1, "content_or_task": 2}
    assert report["shared_tasks"] == [{"files": list(map(str, files)), "tasks": 1}]
    text = run(*files)
    assert "3 records" in text and "have 1 tasks in common" in text


def test_inspect_summarizes_episodes(tmp_path):
    path = tmp_path / "e.parquet"
    episodes = [
        episode(1),
        episode(2),
        episode(3, reward=None, failure="verifier: hung", finish_reason="length"),
    ]
    write_episodes(path, episodes)
    (figures,) = json.loads(run(path, "--json"))["files"]
    assert (figures["rows"], figures["tasks"], figures["groups"]) == (3, 1, 1)
    assert figures["reward"] == {"min": 0.0, "mean": 0.5, "max": 1.0}
    assert figures["failures"] == {"verifier: hung": 1}
    assert figures["finish_reasons"] == {"length": 1, "stop": 2}
    assert figures["strategies"] == {"strategy/direct": 3}
    assert figures["answer_tokens"] == {"min": 1, "mean": 2.0, "max": 3}
    assert "3 episodes" in run(path)


def test_inspect_accepts_empty_file_and_names_line_of_invalid_record(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    assert "0 records" in run(tmp_path / "empty.jsonl")
    (tmp_path / "broken.jsonl").write_text("{}\n")
    with pytest.raises(RequestError) as caught:
        run(tmp_path / "broken.jsonl")
    assert caught.value.where.endswith("broken.jsonl:1")


def run_generate(folder, *arguments):
    return CliRunner().invoke(
        app, ["generate", "open_spiel", "--set", "game=tic_tac_toe", "--teacher", "open_spiel",
              "--out", str(folder), *arguments],
        env={"PERILUNE_HOME": str(folder / "home")},
    )  # fmt: skip


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_inspect_suggests_convert_for_conversations(tmp_path, column):
    (tmp_path / "chats.jsonl").write_text(json.dumps({column: []}) + "\n")
    with pytest.raises(RequestError, match=r"not a record(.|\n)*perilune data convert FILE"):
        run(tmp_path / "chats.jsonl")


def test_generate_writes_records_and_rejected_candidates_of_teacher(tmp_path):
    options = ("--option", "keep=won", "--strategy", "random=1.0", "-n", "12", "--json")
    result = run_generate(tmp_path / "a", *options)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    records = read_records(tmp_path / "a")
    rejected = (tmp_path / "a" / "rejected.jsonl").read_text().splitlines()
    assert (report["rows"], report["sources"]) == (12, {"open_spiel/random": 12}) and len(records) == 12
    assert all(record.score == 1.0 for record in records) and len(rejected) == report["rejected"] > 0
    assert json.loads(rejected[0])["reason"] == "score 0 is below 1e-09"
    assert run_generate(tmp_path / "b", *options).exit_code == 0
    assert (tmp_path / "a" / "records.jsonl").read_bytes() == (tmp_path / "b" / "records.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (("--option", "keep=won", "--strategy", "teacher=1.0", "-n", "5"), WorkFailedError, "0 of 5 .*below"),
        (("--option", "policy"), RequestError, "is not KEY=VALUE"),
        (("--option", "simulations=1"), RequestError, "options.simulations"),
        (("--strategy", "someone=1.0"), RequestError, "no strategy 'someone'"),
    ],
)
def test_generate_fails_on_too_few_records_and_invalid_options(tmp_path, options, error, message):
    result = run_generate(tmp_path, *options)
    assert isinstance(result.exception, error) and re.search(message, str(result.exception))
