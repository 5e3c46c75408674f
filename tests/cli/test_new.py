"""`perilune new`: `perilune run` can plan every recipe that it writes."""

import io
import json
import os
import pty
import subprocess
from pathlib import Path

import pytest
from cli_cases import SCRIPT, environment

FLAGS = ("--model", "tiny", "--environment", "calculator", "--task", "rl")


@pytest.mark.parametrize(
    ("of", "task"),
    [
        ("calculator", "sft"),
        ("calculator", "rl"),
        *(("reasoning_gym/chain_sum", task) for task in ("sft", "rl", "preference")),
    ],
)
def test_new_writes_a_recipe_that_run_can_plan(here, tmp_path: Path, task: str, of: str) -> None:
    done = here("new", "mine", "--model", "tiny", "--environment", of, "--task", task)
    assert done.returncode == 0, done.stderr
    assert "perilune run mine.yaml --plan" in done.stdout
    written = (tmp_path / "mine.yaml").read_text()
    assert written.count("#") > 5
    planned = here("run", "mine.yaml", "--plan")
    assert planned.returncode == 0, planned.stderr
    assert f": {task}" in planned.stdout and "after: evaluate" in planned.stdout


def test_new_refuses_pairs_of_answers_with_several_turns(here, tmp_path: Path) -> None:
    done = here("new", "mine", "--model", "tiny", "--environment", "calculator", "--task", "preference")
    assert done.returncode == 2 and "calculator has several turns" in done.stderr
    assert not (tmp_path / "mine.yaml").exists()


def test_new_writes_fields_of_the_environment(here, tmp_path: Path) -> None:
    chain = ("--model", "tiny", "--environment", "reasoning_gym/chain_sum", "--task", "rl")
    done = here("new", "mine", *chain, "--set", "config.max_terms=2", "--set", "config.min_terms=2")
    assert done.returncode == 0, done.stderr
    assert 'config: {"max_terms": 2, "min_terms": 2}' in (tmp_path / "mine.yaml").read_text()
    assert here("run", "mine.yaml", "--plan").returncode == 0


def test_new_evaluates_on_all_held_out_questions_of_a_small_file(here, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"{n} + 1?", "answer": n + 1}) for n in range(40)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    options = ("--environment", "jsonl", "--task", "rl", "--set", "path=sums.jsonl")
    done = here("new", "sums", "--model", "tiny", *options)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "sums.yaml").read_text().count("tasks: 3,") == 2
    done = here("new", "taught", "--model", "tiny", *options, "--task", "sft")
    assert done.returncode == 0, done.stderr
    assert "traces: 37}" in (tmp_path / "taught.yaml").read_text()
    assert here("run", "taught.yaml", "--plan").returncode == 0
    questions = here("new", "chats", "--model", "tiny", "--from", "sums.jsonl")
    assert questions.returncode == 2 and "{id: jsonl, path: FILE}" in questions.stderr


@pytest.mark.parametrize(
    ("row", "written"),
    [
        (
            '{"prompt": "2+2=", "completion": "4"}',
            'task: sft, checkpoint: model, data: "./own.jsonl", steps: 300',
        ),
        (
            '{"chosen": "2+2= 4", "rejected": "2+2= 5"}',
            'task: preference, checkpoint: model, data: "./own.jsonl"',
        ),
    ],
)
def test_new_derives_the_task_from_own_data(here, tmp_path: Path, row: str, written: str) -> None:
    (tmp_path / "own.jsonl").write_text(f"{row}\n" * 40)
    done = here("new", "mine", "--model", "tiny", "--from", "./own.jsonl")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "mine.yaml").read_text()
    assert written in text and "environment:" not in text and "# A new model" in text
    other = here("new", "other", "--model", "tiny", "--from", "./own.jsonl", "--task", "rl")
    assert other.returncode == 2 and "are for task" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("new", *FLAGS), "NAME is missing"),
        (("new", "mine", *FLAGS[:4]), "--task is missing"),
        (("new", "mine", *FLAGS[2:]), "--model is missing"),
        (("new", "mine", *FLAGS[:4], "--task", "dance"), "dance"),
        (("new", "mine", "--model", "no/such", *FLAGS[2:]), "no model no/such"),
        (("new", "mine", *FLAGS, "--set", "speed=2"), "speed"),
        (("new", "1 mine", *FLAGS), "error: NAME: '1 mine' must begin with a letter"),
        (("new", "/proc/x", *FLAGS), "error: NAME: '/proc/x' must begin with a letter"),
    ],
)
def test_new_refuses_invalid_arguments_and_writes_nothing(
    here, tmp_path: Path, monkeypatch, arguments, said: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())  # not a terminal
    done = here(*arguments)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*.yaml"))


def test_new_does_not_overwrite_existing_file(here, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("mine")
    done = here("new", "mine", *FLAGS)
    assert done.returncode == 2 and "the file exists" in done.stderr
    assert (tmp_path / "mine.yaml").read_text() == "mine"


def test_new_prompts_for_missing_values_on_a_terminal(tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    try:
        os.write(master, b"tiny\n\n")  # the model, and the default task
        done = subprocess.run(
            [SCRIPT, "new", "mine", "--environment", "calculator"],
            cwd=tmp_path, env=environment(tmp_path / "home"), stdin=terminal, capture_output=True, text=True,
            timeout=280, check=False,
        )  # fmt: skip
    finally:
        os.close(master)
        os.close(terminal)
    assert done.returncode == 0, done.stderr
    assert "task: rl" in (tmp_path / "mine.yaml").read_text()
