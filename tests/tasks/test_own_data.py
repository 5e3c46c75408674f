"""Stages on user data files, without an environment: plans, bundles, formats and errors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from task_cases import make_bundle, make_job, metrics, run_in, run_task, summary

from perilune.bundle.freeze import freeze
from perilune.bundle.workspace import Workspace
from perilune.cli.train.plan import derive_plans
from perilune.errors import RequestError
from perilune.files import sha256_file
from perilune.models.checkpoints.loading import load_checkpoint
from perilune.models.text.tokenizer import Tokenizer
from perilune.recipe.load import load_recipe
from perilune.recipe.schema import build_job
from perilune.recipe.staging import stage_files
from perilune.tasks.stage.memory_plan import model_config
from perilune.tasks.supervised import tokens
from perilune.tasks.supervised.demonstrations import Demonstrations
from perilune.ui.overview import describe_data

CHATS = [
    {"messages": [
        {"role": "user", "content": f"{n}+{n}="}, {"role": "assistant", "content": f"{2 * n}"},
        {"role": "user", "content": "and 1?"}, {"role": "assistant", "content": f"{2 * n + 1}"},
    ]}
    for n in range(12)
]  # fmt: skip
PAIRS = [{"prompt": f"{n}+{n}=", "chosen": f"{2 * n}", "rejected": f"{2 * n + 1}"} for n in range(12)]
RECIPE = """\
name: own
model: {{preset: tiny}}
stages:
  - {{name: own, task: {task}, checkpoint: model, data: {data}, steps: 2, batch_size: 4, warmup: 1{more}}}
"""


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe(folder: Path, task: str, data: str, more: str = "") -> Path:
    path = folder / "own.yaml"
    path.write_text(RECIPE.format(task=task, data=data, more=more))
    return path


def test_data_file_is_part_of_the_bundle_digest(tmp_path: Path) -> None:
    write_rows(tmp_path / "chats.jsonl", CHATS)
    loaded = load_recipe(recipe(tmp_path, "sft", "chats.jsonl"))
    assert loaded.stage("own").consumes == {"checkpoint": "model"}
    job, files = stage_files(build_job(loaded, loaded.stage("own")))
    assert files == {"data": tmp_path / "chats.jsonl"} and job.spec["data"] == "inputs/data"
    digests = [freeze(job, files, tmp_path / "first")]
    write_rows(tmp_path / "chats.jsonl", CHATS[1:])
    digests.append(freeze(job, files, tmp_path / "second"))
    assert len(set(digests)) == 2
    bundle = tmp_path / "first"
    assert str(tmp_path) not in (bundle / "job.json").read_text()
    report = summary(run_in(bundle))
    assert report["traces"] == 12 and report["data"]["rows"] == 12
    answers = [text["content"] for row in CHATS for text in row["messages"][1::2]]
    assert report["data"]["learned"] == sum(len(text) + 1 for text in answers)
    assert describe_data(report).startswith(
        f"12 rows, {report['data']['tokens']:,} tokens, "
    )  # as shown in the report
    assert len(metrics(bundle)) == 2


def test_byte_tokenizer_is_chosen_for_non_ascii_data(tmp_path: Path) -> None:
    write_rows(tmp_path / "chats.jsonl", [{"prompt": "naïve", "completion": " 東京 🙂"}] * 4)
    path = recipe(tmp_path, "sft", "chats.jsonl")
    with pytest.raises(RequestError, match=r"no token for 'ï' in .*chats.jsonl:1"):
        load_recipe(path, ["model.tokenizer=characters"])
    loaded = load_recipe(path)
    assert loaded == load_recipe(path, ["model.tokenizer=bytes"]).model_copy(update={"model": loaded.model})
    derive_plans(loaded)
    job, files = stage_files(build_job(loaded, loaded.stage("own")))
    freeze(job, files, tmp_path / "bundle")
    bundle = run_in(tmp_path / "bundle")
    decoder, tokenizer = load_checkpoint(bundle / "artifacts/checkpoints/final")
    assert tokenizer.decode(tokenizer.encode("naïve 東京 🙂\n<eos>")) == "naïve 東京 🙂\n<eos>"
    assert decoder.config.vocab_size == tokenizer.vocab_size == model_config(job).vocab_size == 258
    report = summary(bundle)["data"]
    assert report["learned"] == 4 * (len(" 東京 🙂".encode()) + 1)


def test_bpe_is_trained_on_the_file_and_saved_in_the_checkpoint(tmp_path: Path) -> None:
    rows = [{"prompt": f"Πόσο κάνει {n} συν {n};", "completion": f"Κάνει {2 * n}."} for n in range(12)]
    write_rows(tmp_path / "chats.jsonl", rows)
    path = recipe(tmp_path, "sft", "chats.jsonl")
    loaded = load_recipe(path, ["model.tokenizer=bpe", "model.vocab_size=512", "own.steps=40"])
    (planned,) = derive_plans(loaded)
    job, files = stage_files(build_job(loaded, loaded.stage("own")))
    digests = []
    for name in ("first", "second"):
        freeze(job, files, tmp_path / name)
        bundle = run_in(tmp_path / name)
        final = bundle / "artifacts/checkpoints/final"
        digests.append([sha256_file(final / file) for file in ("tokenizer.json", "model.safetensors")])
    decoder, tokenizer = load_checkpoint(final)
    assert digests[0] == digests[1]
    assert 258 < decoder.config.vocab_size == tokenizer.vocab_size <= 512
    assert summary(bundle)["last"]["loss"] < 0.5
    assert f"{summary(bundle)['data']['tokens']:,} tokens" in planned["derived"]["data"]
    options = {"tasks": 4, "samples": 1, "max_tokens": 24}
    questions = write_rows(
        tmp_path / "q.jsonl", [{"prompt": r["prompt"], "answer": r["completion"]} for r in rows]
    )
    environment = {"id": "jsonl", "path": str(questions), "heldout": {"share": 0.5}}
    evaluated = run_task(
        tmp_path / "e", "evaluate", inputs={"checkpoint": final}, environment=environment, **options
    )
    assert summary(evaluated)["pass@1"]


@pytest.mark.parametrize("task", ["preference", "reward_model"])
def test_preference_tasks_read_pairs_of_a_file(task: str, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "pairs.jsonl", PAIRS)
    options = {"data": "inputs/data", "steps": 2, "batch_size": 4}
    report = summary(run_task(tmp_path / "run", task, inputs={"data": data}, environment={}, **options))
    assert report["pairs"] + report["validation_pairs"] == 12 == report["data"]["rows"]


def test_every_file_format_trains_the_same_model(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(CHATS), tmp_path / "chats.parquet")
    (tmp_path / "folder").mkdir()
    write_rows(tmp_path / "folder" / "train.jsonl", CHATS)
    losses = []
    for name in (write_rows(tmp_path / "chats.jsonl", CHATS).name, "chats.parquet", "folder"):
        loaded = load_recipe(recipe(tmp_path, "sft", f"./{name}"))
        job, files = stage_files(build_job(loaded, loaded.stage("own")))
        bundle = tmp_path / f"{name}-bundle"
        freeze(job, files, bundle)
        losses.append([line["loss"] for line in metrics(run_in(bundle))])
    assert losses[0] == losses[1] == losses[2]


def test_plan_counts_rows_and_epochs(tmp_path: Path) -> None:
    write_rows(tmp_path / "chats.jsonl", CHATS)
    (stage,) = derive_plans(load_recipe(recipe(tmp_path, "sft", "chats.jsonl")))
    assert stage["derived"]["data"].startswith("chats.jsonl: 12 rows, ")
    assert stage["derived"]["data"].endswith("0.7 epochs")
    write_rows(tmp_path / "pairs.jsonl", PAIRS)
    (stage,) = derive_plans(load_recipe(recipe(tmp_path, "preference", "pairs.jsonl")))
    assert stage["derived"]["data"].startswith("pairs.jsonl: 12 rows, ")


def test_plan_counts_epochs_of_training_rows_only(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "chats.jsonl", CHATS)
    evaluated = ["own.validation=0.4", "own.eval={every: 1, tasks: 0}", "own.batch_size=12", "own.steps=2"]
    (stage,) = derive_plans(load_recipe(recipe(tmp_path, "sft", "chats.jsonl"), evaluated))
    reader = tokens.RowReader(Tokenizer.characters(), 512)
    trained = len(Demonstrations([path], reader, seed=0, validation=0.4))
    end = f"; {12 - trained} of 12 rows held out; {24 / trained:.1f} epochs of the rest"
    assert 0 < trained < 12 and stage["derived"]["data"].endswith(end)
    assert "data warning" not in stage["derived"]


def test_texts_are_held_out_individually(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "texts.jsonl", [{"text": f"a text, number {n}"} for n in range(40)])
    reader = tokens.RowReader(Tokenizer.characters(), 512)
    data = Demonstrations([path], reader, seed=0, validation=0.3)
    assert len(data) + len(data.held_out) == 40 and 3 < len(data.held_out) < 25
    assert tokens.RowReader(Tokenizer.characters(), 512).check(path, pairs=False, validation=0.3)[1] == len(
        data.held_out
    )


def test_plan_warns_about_empty_answers_and_high_rates(tmp_path: Path) -> None:
    write_rows(tmp_path / "chats.jsonl", [*CHATS, {"prompt": "1+1=", "completion": ""}])
    (stage,) = derive_plans(load_recipe(recipe(tmp_path, "sft", "chats.jsonl"), ["own.lr=1.0"]))
    assert stage["derived"]["data warning"] == "an empty answer in 1 of 13 rows, first chats.jsonl:13"
    assert "times the default" in stage["derived"]["warning"]


def test_plan_of_a_large_file_samples_tokens_and_checks_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "MOST_CHECKED", 5)
    path = write_rows(tmp_path / "chats.jsonl", CHATS)
    loaded = load_recipe(recipe(tmp_path, "sft", "chats.jsonl"))
    (stage,) = derive_plans(loaded)
    assert stage["derived"]["data"].startswith("chats.jsonl: 12 rows; the first 5 rows, ")
    write_rows(path, [*CHATS, {"messages": []}])
    with pytest.raises(RequestError) as caught:
        derive_plans(loaded)
    assert caught.value.where == f"stages.own: {path}:13"


def test_invalid_row_fails_the_plan_with_file_and_line(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "chats.jsonl", [*CHATS, {"messages": [{"role": "user", "content": "x"}]}])
    command = [sys.executable, "-m", "perilune.cli.main", "run", str(recipe(tmp_path, "sft", "chats.jsonl"))]
    done = subprocess.run([*command, "--plan"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{path}:13: there is no message of the assistant" in done.stderr


@pytest.mark.parametrize(
    ("task", "data", "more", "said"),
    [
        ("sft", "none.jsonl", "", "no such file"),
        ("sft", "org/name", "", "downloads no data"),
        ("sft", "chats", "", "a file or folder of your own is ./chats"),
        ("preference", "chats.jsonl", ", too_long: truncate", "would teach truncation"),
        ("rl", "chats.jsonl", "", "is not a known key"),
    ],
)
def test_invalid_data_path_is_a_recipe_error(
    task: str, data: str, more: str, said: str, tmp_path: Path
) -> None:
    write_rows(tmp_path / "chats.jsonl", CHATS)
    with pytest.raises(RequestError) as caught:
        load_recipe(recipe(tmp_path, task, data, more))
    assert said in str(caught.value) and caught.value.where.startswith(f"{tmp_path}/own.yaml:")


def test_other_tasks_still_need_an_environment(tmp_path: Path) -> None:
    write_rows(tmp_path / "chats.jsonl", CHATS)
    path = recipe(tmp_path, "sft", "chats.jsonl")
    path.write_text(path.read_text() + "  - {name: after, task: evaluate, checkpoint: own}\n")
    with pytest.raises(RequestError, match="environment is missing"):
        load_recipe(path)


def test_killed_stage_resumes_on_its_data_file(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "chats.jsonl", CHATS)
    options = {"data": "inputs/data", "steps": 4, "save_every": 2, "environment": {}}
    whole = run_task(tmp_path / "whole", "sft", inputs={"data": data}, **options)
    bundle = make_bundle(tmp_path / "cut", make_job("sft", inputs={"data": data}, **options), {"data": data})
    workspace = Workspace(bundle)
    right = workspace.progress

    class Stop(Exception):
        pass

    def progress(done: int, total: int, *more: object, **figures: float) -> None:
        right(done, total)
        if done == 3:
            raise Stop

    workspace.progress = progress  # type: ignore[method-assign]
    from perilune.bundle.plugin import load_plugin

    with pytest.raises(Stop):
        load_plugin("sft").run(workspace)
    assert metrics(run_in(bundle)) == metrics(whole)
