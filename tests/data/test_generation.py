"""Generation of records in chunks: a killed and resumed generation writes the same bytes."""

import json
import signal
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perilune.cli.data.records import app
from perilune.data import generation
from perilune.data.generation import GenerationTarget, generate_records
from perilune.data.generators import make_teacher
from perilune.data.generators.collection import TeacherGenerator
from perilune.data.records import read_records
from perilune.environments import Failure, make_environment
from perilune.errors import RequestError, UserInterruptError, WorkFailedError

SECTION = {"id": "calculator", "digits": 1}


class Killed(BaseException):
    """Simulates the end of the process. Handlers of `Exception` do not catch it."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(generation, "CHUNK_TASKS", 8)


def calculator_generator(seed=0, refuse=()):
    """The calculator environment, and a generator whose scorer fails on some tasks."""
    environment = make_environment(SECTION)

    def score(pairs):
        return [
            Failure("verifier", "hung")
            if int(task.task_id[:2], 16) % 5 in refuse
            else environment.score(task, transcript)
            for task, transcript in pairs
        ]

    teacher = make_teacher("calculator")
    return environment, TeacherGenerator(teacher, environment, score, seed, section=SECTION, extra={})


def run_generator(folder, wanted, refuse=(2,)):
    environment, generator = calculator_generator(wanted.seed, refuse)
    return generate_records(generator, environment.tasks("train", wanted.seed), wanted, folder)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_generate_verifies_records_and_writes_provenance(tmp_path):
    report = run_generator(tmp_path, GenerationTarget(records=1000, tasks=30, seed=3))
    rows = read_records(tmp_path)
    refused = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    assert len(rows) + len(refused) == report["tasks"] == 30 and len(refused) == report["rejected"] > 0
    assert {row["reason"] for row in refused} == {"verifier: hung"} == set(report["reasons"])
    assert {(row.score, row.seed) for row in rows} == {(1.0, 3)}
    (provenance,) = {row.provenance for row in rows}
    assert provenance.generator == "calculator" and len(provenance.settings) == 64
    assert set(contents(tmp_path)) == {"records.jsonl", "rejected.jsonl", "generate.json"}
    assert json.loads((tmp_path / "generate.json").read_text()) == report


def test_generate_resumes_after_kill_at_any_write(tmp_path, monkeypatch):
    wanted = GenerationTarget(records=21, tasks=None, seed=1)
    whole = run_generator(tmp_path / "whole", wanted)
    assert whole["rows"] == 21 and whole["tasks"] == 24  # three chunks
    left: list[int] = []
    for name in ("_append_lines", "write_json"):
        real = getattr(generation, name)

        def dying(path, what, real=real, torn=name == "_append_lines"):
            left[0] -= 1
            if left[0] < 0:  # in the middle of a write
                if torn and what:
                    with path.open("ab") as file:
                        file.write(what[0][: len(what[0]) // 2])
                raise Killed
            return real(path, what)

        monkeypatch.setattr(generation, name, dying)
    replace = Path.replace

    def dying_replace(self, target):
        if self.suffix == ".partial":
            left[0] -= 1
            if left[0] < 0:
                raise Killed
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", dying_replace)
    moments = 0
    while True:
        folder = tmp_path / f"killed {moments}"
        left[:] = [moments]
        try:
            run_generator(folder, wanted)
            break
        except Killed:
            assert not (folder / "generate.json").exists()
        left[:] = [moments + 1]  # kill the resumed generation a little later
        try:
            run_generator(folder, wanted)
        except Killed:
            left[:] = [1000]
            run_generator(folder, wanted)
        assert contents(folder) == contents(tmp_path / "whole"), moments
        moments += 1
    assert moments > 12


def test_generate_rejects_duplicates_of_earlier_chunks_after_kill(tmp_path):
    environment, generator = calculator_generator()
    tasks = [task for task, _ in zip(environment.tasks("train", 0), range(12), strict=False)]
    wanted = GenerationTarget(records=100, tasks=24, seed=0)

    def dying():
        yield from tasks
        yield from tasks[:4]
        raise Killed

    with pytest.raises(Killed):
        generate_records(generator, dying(), wanted, tmp_path)
    report = generate_records(generator, [*tasks, *tasks], wanted, tmp_path)
    assert (report["rows"], report["reasons"]) == (12, {"duplicate": 12})


def test_generate_does_not_resume_with_other_settings(tmp_path):
    environment, generator = calculator_generator()

    def dying():
        yield next(environment.tasks("train", 0))
        raise Killed

    with pytest.raises(Killed):
        generate_records(generator, dying(), GenerationTarget(5, 5, 0), tmp_path)
    for other in (
        GenerationTarget(6, 5, 0),
        GenerationTarget(5, 6, 0),
        GenerationTarget(5, 5, 1),
        GenerationTarget(5, 5, 0, "heldout"),
    ):
        with pytest.raises(RequestError, match="other settings"):
            generate_records(generator, environment.tasks("train", 0), other, tmp_path)
    assert (
        generate_records(generator, environment.tasks("train", 0), GenerationTarget(5, 5, 0), tmp_path)[
            "rows"
        ]
        == 5
    )
    with pytest.raises(RequestError, match="already"):
        generate_records(generator, environment.tasks("train", 0), GenerationTarget(5, 5, 0), tmp_path)


def test_generate_stops_when_teacher_is_mostly_rejected(tmp_path):
    report = run_generator(tmp_path, GenerationTarget(records=10, tasks=None, seed=0), refuse=range(5))
    assert report["rows"] == 0 and 40 < report["rejected"] <= 48


def run(*arguments):
    result = CliRunner().invoke(app, ["generate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_generate_command_writes_teacher_records(tmp_path):
    out = tmp_path / "traces"
    report = json.loads(
        run("calculator", "--teacher", "calculator", "--strategy", "guess=1", "--set", "digits=1",
            "--tasks", 9, "--seed", 4, "--out", out, "--json")
    )  # fmt: skip
    assert (report["rows"], report["sources"]) == (9, {"calculator/guess": 9})
    assert len(read_records(out)) == 9
    output = run("planning", "--teacher", "planning", "-n", 3, "--split", "heldout", "--out", tmp_path / "b")
    assert "3 records of planning, 0 rejected" in output
    train = run("planning", "--teacher", "planning", "-n", 3, "--out", tmp_path / "c", "--json")
    assert json.loads(train)["rows"] == 3
    both = [{row.task_id for row in read_records(tmp_path / name)} for name in "bc"]
    assert not both[0] & both[1]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "give either --teacher or --model"),
        (["--teacher", "gold", "--model", "x"], "give either --teacher or --model"),
        (["--teacher", "golt"], "no teacher is called 'golt'"),
        (["--teacher", "planning"], "supports only the planning environments"),
    ],
)
def test_generate_command_rejects_invalid_arguments(tmp_path, arguments, error):
    with pytest.raises(RequestError, match=error):
        run("calculator", *arguments, "--out", tmp_path / "out")
    assert not list(tmp_path.glob("out/*.jsonl"))


def test_generate_command_fails_on_too_few_records_and_keeps_records(tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "CHUNK_TASKS", 256)
    with pytest.raises(WorkFailedError, match="of 1000000 records were kept"):
        run("calculator", "--set", "digits=1", "--teacher", "gold", "-n", 1000000, "--out", tmp_path)
    assert len(read_records(tmp_path)) > 500


def test_generate_command_says_after_ctrl_c_how_to_continue(tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "CHUNK_TASKS", 16)

    def interrupt() -> None:
        while not (tmp_path / "progress.json").exists():
            time.sleep(0.001)
        signal.raise_signal(signal.SIGINT)

    arguments = ("calculator", "--teacher", "gold", "-n", 5000, "--set", "digits=1", "--out", tmp_path)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(UserInterruptError) as caught:
        run(*arguments)
    assert caught.value.remedy == "run the same command again; it continues where it stopped"
    assert not (tmp_path / "records.jsonl").exists()


def test_generate_uses_no_more_tasks_than_few_records_need(tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "CHUNK_TASKS", 256)
    report = run_generator(tmp_path, GenerationTarget(records=3, tasks=None, seed=0))
    assert (report["rows"], report["tasks"]) == (3, 16)  # a model would answer each of these tasks


def test_generate_with_model_does_not_depend_on_chunk_size(tmp_path, monkeypatch):
    """A new model writes random characters, and often enough the accepted one."""
    from perilune.models.checkpoints.loading import new_model, save_checkpoint
    from perilune.models.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.characters()
    decoder = new_model("tiny", tokenizer, 0)
    save_checkpoint(tmp_path / "model", decoder, tokenizer)
    (tmp_path / "questions.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}?", "answer": "."}) + "\n" for n in range(40))
    )
    extra = [
        "jsonl", "--set", f"path={tmp_path / 'questions.jsonl'}", "--set", "match=contains", "--model",
        tmp_path / "model", "--samples", 3, "--max-tokens", 120, "--temperature", 5, "--tasks", 16, "--json",
    ]  # fmt: skip
    whole = json.loads(run(*extra, "--out", tmp_path / "one"))
    monkeypatch.setattr(generation, "CHUNK_TASKS", 5)
    other = json.loads(run(*extra, "--out", tmp_path / "other"))
    assert whole == other and whole["rows"] + whole["rejected"] == 48 and 0 < whole["rows"] <= 16
    assert whole["provenance"]["generator"] == "sampled"
    rows = read_records(tmp_path / "one")
    assert all("." in row.answer and row.source == "sampled/own" for row in rows)
    assert contents(tmp_path / "one") == contents(tmp_path / "other")
