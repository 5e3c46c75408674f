"""Filtering of records: each line is kept or listed as rejected with a reason."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from perilune.cli.data.records import app
from perilune.data.filtering import FilterSettings, filter_files
from perilune.data.records import TraceRecord, deduplicate, read_records, write_records
from perilune.data.similarity import Contamination, minhash_signature, split_words
from perilune.errors import RequestError, WorkFailedError
from perilune.files import read_json_lines

LONG = "The quick brown fox jumps over the lazy dog while seven wizards quietly brew coffee"


def record(answer, *, prompt="What is it?", task="t", score=1.0):
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return TraceRecord(messages, environment="e", task_id=task, score=score, source="s", seed=0)


def run_filter(tmp_path, records, *, evaluation=(), **options):
    write_records(tmp_path / "in.jsonl", records)
    heldout = []
    if evaluation:
        write_records(tmp_path / "held.jsonl", evaluation)
        heldout = [tmp_path / "held.jsonl"]
    out = tmp_path / "out"
    report = filter_files([tmp_path / "in.jsonl"], heldout, FilterSettings(**options), out)
    rejected = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    return read_records(out / "train.jsonl"), {row["line"]: row["reason"] for row in rejected}, report


def test_filter_gives_each_rejected_line_its_reason(tmp_path):
    records = [
        record("good", task="1"), record("good", task="1"), record("poor", task="2", score=0.2),
        record("", task="3"), record("x" * 300, task="4"), record("better", task="1", score=2.0),
    ]  # fmt: skip
    kept, reasons, report = run_filter(tmp_path, records, min_score=0.5, max_characters=200)
    assert [row.messages[-1]["content"] for row in kept] == ["better"]
    assert reasons == {1: "not best", 2: "duplicate", 3: "score", 4: "too short", 5: "too long"}
    assert report["read"] == 6 and report["train"] == 1
    assert sum(report["rejected"].values()) == 5
    assert json.loads((tmp_path / "out/filter.json").read_text()) == json.loads(json.dumps(report))


def test_filter_refuses_to_overwrite_its_input(tmp_path):
    write_records(tmp_path / "train.jsonl", [record("good"), record("best", score=2.0)])
    with pytest.raises(RequestError, match="would be overwritten"):
        filter_files([tmp_path / "train.jsonl"], [], FilterSettings(), tmp_path)
    assert len(read_records(tmp_path / "train.jsonl")) == 2


def test_filter_names_the_file_of_each_rejected_line(tmp_path):
    (tmp_path / "in").mkdir()
    write_records(tmp_path / "in" / "records.jsonl", [record("good"), record("best", score=2.0)])
    filter_files([tmp_path / "in"], [], FilterSettings(), tmp_path / "out")
    (row,) = map(json.loads, (tmp_path / "out" / "rejected.jsonl").read_text().splitlines())
    assert (row["file"], row["line"]) == (str(tmp_path / "in" / "records.jsonl"), 1)


def test_detail_of_duplicate_names_file_and_line_of_kept_record(tmp_path):
    kept, twin = record(LONG, task="1"), record(LONG + " again", task="2", score=0.5)
    write_records(tmp_path / "a.jsonl", [kept, record("other", task="3")])
    (tmp_path / "a.jsonl").write_bytes(b"\n\n" + (tmp_path / "a.jsonl").read_bytes())
    write_records(tmp_path / "b.jsonl", [kept, twin])
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    filter_files(inputs, [], FilterSettings(near=0.5), tmp_path / "out")
    rows = list(read_json_lines(tmp_path / "out" / "rejected.jsonl"))
    assert [(row["file"], row["line"]) for row in rows] == [(str(inputs[1]), 1), (str(inputs[1]), 2)]
    assert rows[0]["detail"] == f"of {inputs[0]}:3" and rows[1]["detail"].startswith(f"of {inputs[0]}:3, ")


def test_filter_keeps_invalid_lines_in_rejected_file_and_continues(tmp_path):
    good = [record(f"answer {index}", task=str(index)) for index in range(3)]
    write_records(tmp_path / "in.jsonl", good)
    lines = (tmp_path / "in.jsonl").read_bytes().splitlines()
    changed = lines[1].replace(b"answer 1", b"answer 9")
    broken = [b"{", b'{"messages": []}', b"\xff\xfe", b"[" * 100_000, changed, b"null"]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([lines[0], *broken, lines[2], b""]))
    report = filter_files([tmp_path / "in.jsonl"], [], FilterSettings(), tmp_path / "out")
    assert len(read_records(tmp_path / "out/train.jsonl")) == 2
    rows = [json.loads(line) for line in (tmp_path / "out/rejected.jsonl").read_text().splitlines()]
    assert [row["line"] for row in rows] == [2, 3, 4, 5, 6, 7] and report["rejected"] == {"broken": 6}
    assert all(row["reason"] == "broken" and row["detail"] for row in rows)
    assert rows[4]["row"] == changed.decode() and "changed" in rows[4]["detail"]


def test_filter_command_names_first_broken_row(tmp_path):
    chat = b'{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}\n'
    write_records(tmp_path / "in.jsonl", [record("fine")])
    data = b"\xef\xbb\xbf" + (tmp_path / "in.jsonl").read_bytes() + chat
    (tmp_path / "in.jsonl").write_bytes(data)
    command = ["filter", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "2 records read, 1 kept" in result.output
    assert f"{tmp_path / 'in.jsonl'}:2: the row is a conversation" in result.output
    assert "perilune data convert" in result.output


@pytest.mark.parametrize("bound", ["nan", "inf"])
def test_filter_refuses_score_that_is_not_finite(tmp_path, bound):
    write_records(tmp_path / "in.jsonl", [record("fine")])
    command = ["filter", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out"), "--min-score", bound]
    assert "finite number" in str(CliRunner().invoke(app, command).exception)


def test_filter_rejects_line_above_length_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("perilune.data.lines.MAX_LINE_BYTES", 1000)
    write_records(tmp_path / "good.jsonl", [record("fine")])
    good = (tmp_path / "good.jsonl").read_bytes()
    (tmp_path / "in.jsonl").write_bytes(b"x" * 5000 + b"\n" + good)
    report = filter_files([tmp_path / "in.jsonl"], [], FilterSettings(), tmp_path / "out")
    assert report["train"] == 1 and report["rejected"] == {"broken": 1}


def test_filter_removes_near_duplicates(tmp_path):
    near = LONG.replace("lazy", "sleepy")
    other = "Completely different words about tax law in the nineteenth century and its many consequences"
    records = [record(LONG, task="1"), record(near, task="2"), record(other, task="3")]
    kept, reasons, _ = run_filter(tmp_path, records, near=0.7)
    assert reasons == {2: "near duplicate"} and len(kept) == 2
    (tmp_path / "again").mkdir()
    assert len(run_filter(tmp_path / "again", records)[0]) == 3


@pytest.mark.parametrize("scores", [(0.0, 1.0), (1.0, 0.0), (0.0, 0.5, 1.0), (0.5, 1.0, 0.0)])
def test_filter_keeps_the_best_of_near_duplicates(tmp_path, scores):
    endings = ("4", "5", "6")
    records = [
        record(f"{LONG}, so the answer is {ending}", task=ending, score=score)
        for ending, score in zip(endings, scores, strict=False)
    ]
    kept, reasons, report = run_filter(tmp_path, records, near=0.7)
    assert [row.score for row in kept] == [1.0]
    best = scores.index(1.0) + 1
    assert reasons == dict.fromkeys({*range(1, len(scores) + 1)} - {best}, "near duplicate")
    assert report["rejected"] == {"near duplicate": len(scores) - 1} and report["train"] == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("3 + 4", "3 + 4"),
        ("3  -  4", "3 - 4"),
        ("3-4", "3 - 4"),
        ("3 × (−4)", "3 * - 4"),
        ("2**3", "2 ** 3"),
        ("(x + y)/2 < z", "x + y / 2 < z"),
        ("the held-out GPT-4 and/or a plan", "the held out gpt 4 and or a plan"),
        ("apples:\n- 3 red\n* 4 green", "apples 3 red 4 green"),
        ("in *2023* or **2024**", "in 2023 or 2024"),
    ],
)
def test_words_include_operators_but_no_layout(text, words):
    assert split_words(text) == words.split()


def test_prompts_with_different_operators_are_no_contamination(tmp_path):
    records = [record("12", prompt="What is 3 * 4?", task="1"), record("7", prompt="What is 3+4", task="2")]
    evaluation = [record("7", prompt="What is 3 + 4?", task="h")]
    kept, reasons, _ = run_filter(tmp_path, records, evaluation=evaluation)
    assert [row.prompt for row in kept] == ["What is 3 * 4?"] and reasons == {2: "contaminated"}


def test_filter_removes_contaminated_records(tmp_path):
    records = [
        record("clean", task="1"),
        record("an answer", prompt="The  HELD-OUT question, asked!", task="2"),
        record(f"As somebody said: {LONG.upper()}.", task="3"),
    ]
    evaluation = [
        record("42", prompt="the held out question asked", task="h"),
        record(LONG, prompt="Say it", task="i"),
    ]
    kept, reasons, _ = run_filter(tmp_path, records, evaluation=evaluation)
    assert reasons == {2: "contaminated", 3: "contaminated"} and len(kept) == 1


def test_filter_removes_other_languages(tmp_path):
    records = [
        record("This is an English sentence about the weather in London.", task="1"),
        record("Ceci est une phrase française qui parle du temps qu'il fait à Paris.", task="2"),
        record("12 + 34 = 46", task="3"),
    ]
    _, reasons, _ = run_filter(tmp_path, records, languages=("en",))
    assert reasons == {2: "language", 3: "language"}


def test_validation_split_keeps_tasks_together(tmp_path):
    records = [record(f"answer {index}", task=str(index % 40)) for index in range(200)]
    train, _, report = run_filter(tmp_path, records, validation=0.3, best=None)
    validation = read_records(tmp_path / "out/validation.jsonl")
    assert {row.task_id for row in train}.isdisjoint(row.task_id for row in validation)
    assert len(train) + len(validation) == 200 and 20 < len(validation) < 120
    assert report["validation"] == len(validation)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=30))
@settings(max_examples=25, deadline=None)
def test_filter_keeps_best_record_per_task_and_accounts_for_every_line(tmp_path_factory, drawn):
    records = [record(f"a{answer}", task=str(task), score=float(score)) for answer, task, score in drawn]
    kept, reasons, report = run_filter(tmp_path_factory.mktemp("f"), records, best=1)
    assert len(kept) + len(reasons) == report["read"] == len(records)
    distinct = {row.digest: row for row in reversed(records)}  # the first of equal conversations
    best = {}
    for row in records:
        known = best.get(row.task_id)
        if row is distinct[row.digest] and (known is None or row.score > known.score):
            best[row.task_id] = row
    assert [row.digest for row in kept] == [row.digest for row in records if best.get(row.task_id) is row]


def test_filter_rejects_folder_with_filtered_data(tmp_path):
    run_filter(tmp_path, [record("x")])
    with pytest.raises(RequestError, match="already"):
        run_filter(tmp_path, [record("x")])


def test_filter_names_missing_package_and_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(RequestError, match="datasketch") as caught:
        run_filter(tmp_path, [record("x")], near=0.8)
    assert "perilune[data]" in caught.value.remedy
    assert not (tmp_path / "out/train.jsonl").exists()


def test_signatures_estimate_similarity():
    a, b = minhash_signature(LONG), minhash_signature(LONG.replace("coffee", "tea"))
    assert (a == minhash_signature(LONG.upper() + "!")).all()
    assert 0.6 < (a == b).mean() < 1.0
    assert (a == minhash_signature("nothing of the kind here")).mean() < 0.2


def test_contamination_needs_ngram_of_consecutive_words():
    known = Contamination(ngram=4)
    known.add("one two three four five", "six")
    assert known.found_in("x two three four FIVE y", "") == "the same 4 words: 'two three four five'"
    assert known.found_in("one two three", "four") is not None
    assert known.found_in("two three four x five", "") is None


def test_filter_command_reports_kept_and_rejected_records(tmp_path):
    write_records(
        tmp_path / "in.jsonl", [record("x", task="1"), record("x", task="1"), record("y", task="2")]
    )
    out = str(tmp_path / "clean")
    run = CliRunner().invoke(
        app, ["filter", str(tmp_path / "in.jsonl"), "--out", out], catch_exceptions=False
    )
    assert run.exit_code == 0 and "3 records read, 2 kept" in run.output and "duplicate" in run.output
    result = CliRunner().invoke(app, ["filter", str(tmp_path / "in.jsonl"), "--out", out + "2", "--json"])
    assert json.loads(result.stdout)["rejected"] == {"duplicate": 1}


def test_filter_command_fails_if_no_record_is_kept(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(WorkFailedError, match="no record was kept"):
        CliRunner().invoke(
            app,
            ["filter", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "clean")],
            catch_exceptions=False,
        )
    (rejected,) = read_json_lines(tmp_path / "clean" / "rejected.jsonl")
    assert rejected["reason"] == "broken"


def test_filter_does_not_write_into_a_folder_of_generated_data(tmp_path):
    write_records(tmp_path / "made" / "records.jsonl", [record("x", task="1")])
    (tmp_path / "made" / "generate.json").write_text("{}")
    (tmp_path / "made" / "rejected.jsonl").write_text("{}\n")
    with pytest.raises(RequestError, match="already has generated data"):
        filter_files([tmp_path / "made"], [], FilterSettings(), tmp_path / "made")
    assert (tmp_path / "made" / "rejected.jsonl").read_text() == "{}\n"


@pytest.mark.thorough
def test_filter_memory_does_not_grow_with_input(tmp_path):
    """Peak memory with 20 times the lines grows by no more than the cache of the index."""
    script = """
import resource, sys
from pathlib import Path
from perilune.data.filtering import FilterSettings, filter_files
filter_files([Path(sys.argv[1])], [], FilterSettings(near=None), Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""

    def peak(count):
        path = tmp_path / f"{count}.jsonl"
        write_records(path, (record(f"{index} {'x' * 300}", task=str(index)) for index in range(count)))
        command = [sys.executable, "-c", script, str(path), str(tmp_path / f"out{count}")]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert peak(20_000) - peak(1_000) < 12_000  # KiB; the lines alone are 9 MiB, parsed several times that


def test_filter_keeps_conversations_of_sub_agents_and_of_player(tmp_path):
    own = record("all in all")
    parts = [own.of_sub_agent(str(n), record(f"part {n}", prompt=f"{n}?").messages) for n in range(2)]
    kept, reasons, _ = run_filter(tmp_path, [*parts, own])
    assert kept == [*parts, own] and not reasons and list(deduplicate([*parts, own])) == kept
