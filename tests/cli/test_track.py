"""Metrics in TensorBoard, W&B and MLflow: their own readers find each row of metrics.jsonl once."""

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_cases import LIGHT, SCRIPT, environment

from perilune.errors import RequestError
from perilune.files import append_json_line, write_json_lines
from perilune.tracking import SINKS, FigureReader, Figures, TrackedRun, open_sink

RUN = TrackedRun("01RUN", "adding", "rl", 1_700_000_000.0, {"lr": 0.001, "environment": {"id": "x"}})
STEPS = [{"step": n, "reward": n / 10, "pass@1": 0.5, "note": "words", "none": None} for n in (1, 2, 3, 4)]
Found = dict[str, list[tuple[int, float]]]


def from_tensorboard(directory: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(directory / "adding" / "rl-01RUN"), size_guidance={"scalars": 0})
    read.Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def records(file: Path) -> Iterator[bytes]:
    """Records of an offline W&B run: LevelDB's log format in 32 KiB blocks, after a 7-byte header."""
    data, offset, whole = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while offset + 7 <= len(data):
        room = 32768 - offset % 32768
        length, kind = struct.unpack("<HB", data[offset + 4 : offset + 7])
        if room < 7 or (length == 0 and kind == 0):
            offset += room
            continue
        whole += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a complete record or its last part
            yield whole
            whole = b""


def from_wandb(directory: Path) -> Found:
    from wandb.proto.wandb_internal_pb2 import Record

    (folder,) = (directory / "wandb").glob("offline-run-*-01run")
    deadline = time.monotonic() + 60
    while True:  # wandb's process may write the file after the run has finished
        stored = [Record.FromString(data) for data in records(folder / "run-01run.wandb")]
        if any(record.HasField("exit") for record in stored):
            break
        assert time.monotonic() < deadline, "wandb did not write the end of the run"
        time.sleep(0.2)
    figures: Found = {}
    for record in stored:
        for item in record.history.item:
            name = item.key or item.nested_key[0]
            if not name.startswith("_"):
                figures.setdefault(name, []).append((record.history.step.num, json.loads(item.value_json)))
    return figures


def from_mlflow(directory: Path) -> Found:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=directory.absolute().as_uri())
    experiment = client.get_experiment_by_name("adding")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["lr"] == "0.001"
    assert run.info.status == "FINISHED"
    return {
        name.replace("_at_", "@"): sorted(
            (point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)
        )
        for name in run.data.metrics
    }


READERS: dict[str, Callable[[Path], Found]] = {
    "tensorboard": from_tensorboard, "wandb": from_wandb, "mlflow": from_mlflow,
}  # fmt: skip


def copy_to_tracker(name: str, directory: Path, artifacts: Path, trail: FigureReader | None = None) -> None:
    sink = open_sink(name, directory, RUN)
    for figures in (trail or FigureReader(sink.after)).read(artifacts, ended=True):
        sink.write(figures)
    sink.close()


@pytest.mark.parametrize("name", SINKS)
def test_tracker_receives_each_metric_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    write_json_lines(tmp_path / "metrics.jsonl", STEPS)
    write_json_lines(tmp_path / "timings.jsonl", [{"step": 2, "learning": 2.0, "tokens_per_second": 9.0}])
    for _ in range(2):  # the second copy replaces the first
        copy_to_tracker(name, tmp_path / "there", tmp_path)
    metrics = READERS[name](tmp_path / "there")
    assert set(metrics) == {"reward", "pass@1", "timing/learning", "timing/tokens_per_second"}
    assert [step for step, _ in metrics["reward"]] == [1, 2, 3, 4]
    assert [value for _, value in metrics["reward"]] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert metrics["timing/learning"] == [(2, 2.0)]


def test_trail_reads_growing_files_and_follows_the_next_attempt(tmp_path: Path) -> None:
    trail = FigureReader()

    def steps(artifacts: Path, *, ended: bool = False) -> list[int]:
        return [figures.step for figures in trail.read(artifacts, ended=ended)]

    first, second = tmp_path / "1", tmp_path / "2"
    assert steps(first) == []  # no file yet
    write_json_lines(first / "metrics.jsonl", STEPS[:3])
    assert steps(first) == [1, 2]  # the timings of step 3 may still be missing
    with (first / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # truncated by a kill
    assert steps(first) == []
    write_json_lines(second / "metrics.jsonl", STEPS[:1])  # the next attempt resumed from step 1
    for row in STEPS[1:]:
        append_json_line(second / "metrics.jsonl", row)
    write_json_lines(
        second / "timings.jsonl", [{"step": n, "sampling": 1.0, "other": 0.5} for n in (1, 2, 3)]
    )
    assert list(trail.read(second, ended=False)) == [
        Figures(3, 4.5, {"reward": 0.3, "pass@1": 0.5, "timing/sampling": 1.0, "timing/other": 0.5})
    ]
    assert steps(second, ended=True) == [4]
    assert steps(second, ended=True) == []


@pytest.mark.parametrize("name", SINKS)
def test_trackers_get_the_evaluation_before_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    write_json_lines(tmp_path / "metrics.jsonl", [{"step": 0, "eval/heldout/pass@1": 0.5}, *STEPS])
    copy_to_tracker(name, tmp_path / "there", tmp_path)
    assert READERS[name](tmp_path / "there")["eval/heldout/pass@1"] == [(0, 0.5)]


def test_trail_skips_what_is_no_number_and_rows_without_step(tmp_path: Path) -> None:
    rows = [
        [],
        {"reward": 1.0},
        {"step": [1]},
        {"step": 10**19},
        {"step": 1, "reward": 0.5, "loss": 10**400, "kl": None},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (figures,) = FigureReader().read(tmp_path, ended=True)
    assert (figures.step, figures.values) == (1, {"reward": 0.5})


def test_open_sink_names_unknown_and_uninstalled_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match=r"'aim'(.|\n)*tensorboard, wandb, mlflow"):
        open_sink("aim", tmp_path, RUN)
    monkeypatch.setitem(sys.modules, "perilune.tracking.to_wandb", None)
    with pytest.raises(RequestError, match=r"wandb cannot be imported(.|\n)*perilune\[tracking\]"):
        open_sink("wandb", tmp_path, RUN)


@pytest.mark.thorough
def test_run_is_tracked_and_failing_tracker_only_warns(tmp_path: Path) -> None:
    rewards = "{verifier: 1.0, mine: {function: 'mine.py:f', weight: 0.5}}"
    head = f"tracking: [wandb, tensorboard]\nrewards: {rewards}\n"
    (tmp_path / "mine.py").write_text(
        "def f(completions):\n    return [1.0]  # what nobody else shall read\n"
    )
    recipe = LIGHT.replace("stages:\n", f"{head}stages:\n").replace(
        "{name: base, task: evaluate, checkpoint: model, tasks: 3, samples: 2, max_tokens: 8}",
        "{name: sft, task: sft, data: traces, steps: 12, batch_size: 4}",
    )
    (tmp_path / "small.yaml").write_text(recipe)
    nobody = {
        "WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_INIT_TIMEOUT": "2",
    }  # fmt: skip
    command = [SCRIPT, "run", "small.yaml", "--json"]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path / "home") | nobody, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("warning: tracking with wandb failed at traces") == 1, ran.stderr
    (stage,) = [stage for stage in json.loads(ran.stdout)["stages"] if stage["name"] == "sft"]
    bundle = Path(json.loads(ran.stdout)["bundles"]["sft"])
    rows = [json.loads(line) for line in (bundle / "artifacts" / "metrics.jsonl").read_text().splitlines()]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "home" / "tracking" / "tensorboard" / "small" / f"sft-{stage['run']}"
    read = EventAccumulator(str(folder))
    read.Reload()
    assert [event.value for event in read.Scalars("loss")] == pytest.approx([row["loss"] for row in rows])

    command = [SCRIPT, "track", "sft", "--to", "mlflow", "--out", "there"]
    variables = environment(tmp_path / "home")
    copied = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=True)
    assert copied.stdout.startswith("sft: 12 steps; MLFLOW_ALLOW_FILE_STORE=true mlflow ui")
    (told_rewards,) = (tmp_path / "there").rglob("params/rewards")
    assert told_rewards.read_text() == "{'mine': 0.5, 'verifier': 1.0}"
    texts = [path.read_text(errors="replace") for path in (tmp_path / "there").rglob("*") if path.is_file()]
    assert not any("nobody else" in text for text in texts)

    key = "0" * 40
    holders = [
        path for path in tmp_path.rglob("*") if path.is_file() and key in path.read_text(errors="replace")
    ]
    assert holders == []  # no file contains the API key
    assert "WANDB_API_KEY" not in os.environ
