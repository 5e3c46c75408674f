"""Invalid input that only a running task can detect: an error with its place, and exit code 2."""

import json
import shutil
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from task_cases import DIGITS, make_job, run_task

from perilune.bundle.freeze import freeze
from perilune.data.records import TraceRecord, write_records
from perilune.errors import RequestError, WorkFailedError
from perilune.files import read_json

Row = dict[str, Any]


def write_traces(folder: Path, *answers: str) -> Path:
    """Write a dataset with one trace per answer."""
    records = [
        TraceRecord(
            [{"role": "user", "content": f"{index}="}, {"role": "assistant", "content": answer}],
            environment="digits", task_id=str(index), score=1.0, source="gold/direct", seed=0,
        )
        for index, answer in enumerate(answers)
    ]  # fmt: skip
    write_records(folder / "records.jsonl", records)
    return folder


def with_second_row(folder: Path, change: Callable[[Row], object]) -> Path:
    """Apply `change` to the second row of a dataset."""
    file = folder / "records.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    change(rows[1])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: row.pop("task_id"), "the field 'task_id' is missing"),
        (lambda row: row.update(reward=1.0), "unknown field 'reward'"),
        (lambda row: row.update(score="good"), "field 'score' is 'good', not a finite number"),
        (lambda row: row["messages"].pop(), "does not end with the assistant's answer"),
        (lambda row: row["messages"][0].update(role="boss"), "messages[0]"),
        (lambda row: row["messages"][1].update(content="2"), "the row was changed"),
    ],
)
def test_row_that_violates_the_schema_is_refused(
    change: Callable[[Row], object], said: str, tmp_path: Path
) -> None:
    data = with_second_row(write_traces(tmp_path / "data", "1", "1", "1"), change)
    with pytest.raises(RequestError) as caught:
        run_task(tmp_path / "sft", "sft", inputs={"data": data})
    assert said in caught.value.what
    assert caught.value.where == f"{tmp_path}/sft/inputs/data/records.jsonl:2"
    assert not (tmp_path / "sft" / "artifacts" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("1" * 5000, "the row has 5003 tokens, and the model has 4096 positions"),
        ("naïve", "the tokenizer cannot encode 'ï' in 'naïve'"),
    ],
)
def test_trace_that_the_model_cannot_encode_is_refused(answer: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        run_task(tmp_path / "sft", "sft", inputs={"data": write_traces(tmp_path / "data", "1", answer, "1")})
    assert said in caught.value.what
    assert caught.value.where == f"{tmp_path}/sft/inputs/data/records.jsonl:2"
    assert caught.value.remedy


def test_empty_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no rows to train on"):
        run_task(tmp_path / "sft", "sft", inputs={"data": write_traces(tmp_path / "data")})


def test_dataset_of_long_rows_alone_says_that_they_are_too_long(tmp_path: Path) -> None:
    data = write_traces(tmp_path / "data", "1", "2")
    with pytest.raises(RequestError, match="all 2 are longer than 2 tokens") as caught:
        run_task(tmp_path / "sft", "sft", inputs={"data": data}, max_length=2, too_long="drop")
    assert "max_length" in caught.value.remedy


@pytest.mark.parametrize(("task", "options"), [("evaluate", {"tasks": 20}), ("collect", {"traces": 60})])
def test_environment_with_too_few_tasks_is_an_error(task: str, options: Row, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"digits gave|no more training tasks") as caught:
        run_task(tmp_path / task, task, environment={**DIGITS, "limit": 60}, **options)
    if task == "collect":
        kept = int(caught.value.what.split()[0])
        assert 0 < kept < 60 and "(the environment has no more training tasks)" in caught.value.what
        assert caught.value.remedy.startswith(f"set traces to {kept} at most")
    else:
        assert isinstance(caught.value, RequestError)
        assert "widen the environment's config" in caught.value.remedy


@pytest.mark.parametrize("task", ["rl", "evaluate"])
def test_max_tokens_beyond_the_model_positions_is_refused(task: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="max_tokens: 4096 is too many: the model has 4096 positions"):
        run_task(tmp_path / "whole", task, max_tokens=4096)
    with pytest.raises(RequestError, match=r"\d tokens and 4095 more exceed the model's 4096"):
        run_task(tmp_path / "prompt", task, max_tokens=4095)


@pytest.mark.parametrize("task", ["rl", "evaluate"])
def test_prompt_that_the_tokenizer_cannot_encode_is_refused(task: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot encode '€' in '€"):
        run_task(tmp_path / task, task, environment={**DIGITS, "prefix": "€"})


@pytest.mark.parametrize("task", ["rl", "evaluate"])
def test_empty_prompts_fail_the_stage(task: str, tmp_path: Path) -> None:
    environment = {"id": "factory", "factory": "task_environments:Silent"}
    with pytest.raises(WorkFailedError, match=r"scored no .*: the prompt has no tokens"):
        run_task(tmp_path / task, task, environment=environment)


def test_worker_exits_with_code_2_on_bad_input(tmp_path: Path) -> None:
    """The stored result also has exit code 2 and the cause."""
    data = with_second_row(write_traces(tmp_path / "data", "1", "1"), lambda row: row.pop("score"))
    bundle = tmp_path / "bundle"
    freeze(make_job("sft", inputs={"data": data}), {"data": data}, bundle)
    script = "import sys; from perilune.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, "worker", str(bundle)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert f"{bundle}/inputs/data/records.jsonl:2: the field 'score' is missing" in done.stderr
    assert "Traceback" not in done.stderr
    verdict = read_json(bundle / "runtime" / "result.json")
    assert (verdict["exit_code"], verdict["cause"]) == (2, "request_error")


def test_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    first = run_task(
        tmp_path / "sft", "sft", inputs={"data": write_traces(tmp_path / "data", *string.digits)}, steps=1
    )
    folder = shutil.copytree(first / "artifacts" / "checkpoints" / "final", tmp_path / "copy")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(RequestError, match="not a safetensors file"):
        run_task(tmp_path / "evaluate", "evaluate", inputs={"checkpoint": folder})
