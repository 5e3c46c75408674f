"""`perilune run`: stages are reused, shared, interrupted and resumed."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cli_cases import LIGHT, SCRIPT, environment

pytestmark = pytest.mark.slow

LONG = LIGHT + "  - {name: long, task: sft, data: traces, steps: 100000, batch_size: 8, save_every: 5}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose home all tests of this module share, so its stages run once."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "small.yaml").write_text(LIGHT)
    (folder / "long.yaml").write_text(LONG)
    yield folder
    for process in workers(folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def workers(folder: Path) -> list[psutil.Process]:
    """Processes whose command line names `folder`."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(folder) in part for part in process.cmdline()):
                processes.append(process)
    return processes


class Command:
    """A running command whose stderr can be read at any time."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        descriptor, name = tempfile.mkstemp(dir=folder, suffix=".err")
        self._said = Path(name)
        self.process = subprocess.Popen(
            [SCRIPT, *arguments],
            cwd=folder,
            env=environment(folder / "home"),
            stdout=subprocess.PIPE,
            stderr=descriptor,
            text=True,
        )
        os.close(descriptor)

    @property
    def said(self) -> str:
        return self._said.read_text()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def finish(self, code: int = 0) -> tuple[str, str]:
        out, _ = self.process.communicate(timeout=280)
        assert self.process.returncode == code, self.said
        assert "Traceback" not in self.said
        return out, self.said


@pytest.fixture(scope="module")
def first(folder: Path) -> tuple[dict, str]:
    """JSON document and stderr of the first run of the recipe, by two concurrent processes."""
    processes = [Command(folder, "run", "small.yaml", "--json") for _ in range(2)]
    (out, err), (other, _) = (process.finish() for process in processes)
    assert [stage["run"] for stage in json.loads(other)["stages"]] == [
        stage["run"] for stage in json.loads(out)["stages"]
    ]
    return json.loads(out), err


@pytest.mark.thorough
def test_two_processes_with_one_recipe_share_runs(first: tuple[dict, str], folder: Path) -> None:
    document, _ = first
    assert [stage["state"] for stage in document["stages"]] == ["succeeded", "succeeded"]
    assert {path.name for path in (folder / "home" / "runs").iterdir()} == {
        stage["run"] for stage in document["stages"]
    }
    assert all(stage["attempts"] == 1 for stage in document["stages"])


def test_run_json_is_the_only_stdout_and_plan_precedes_the_work(first: tuple[dict, str]) -> None:
    document, err = first
    assert set(document) == {
        "experiment_id", "recipe", "seed", "stages", "evaluations", "calibrations", "training", "held_out",
        "forgetting", "cost", "report", "bundles", "seconds",
    }  # fmt: skip
    (evaluation,) = document["evaluations"]
    assert evaluation["stage"] == "base"
    assert set(evaluation["pass@1"]) == {"mean", "low", "high"}
    assert Path(document["report"]).read_text().startswith("<!doctype html>")
    assert err.index("small, seed 0: model tiny") < err.index("[traces] started")


def test_run_reuses_finished_stages(first: tuple[dict, str], folder: Path) -> None:
    document, _ = first
    out, err = Command(folder, "run", "small.yaml").finish()
    assert "[traces] reused" in err
    assert "[base] reused" in err
    assert "started" not in err
    assert "pass@1" in out
    assert "perilune run small.yaml --seed 1" in out
    assert document["bundles"]["base"] in out


def interrupt_long_stage(folder: Path) -> Path:
    """Stop the long stage with Ctrl-C; returns its newest checkpoint."""
    process = Command(folder, "run", "long.yaml")
    checkpoint = wait_for_checkpoint(folder)
    process.interrupt()
    _, err = process.finish(130)
    assert "stopping long" in err
    assert err.endswith("error: interrupted\n")
    assert not workers(folder)
    return checkpoint


def test_ctrl_c_stops_the_stage(first: tuple[dict, str], folder: Path) -> None:
    interrupt_long_stage(folder)


@pytest.mark.thorough
def test_run_after_ctrl_c_resumes_from_the_checkpoint(first: tuple[dict, str], folder: Path) -> None:
    checkpoint = interrupt_long_stage(folder)

    again = Command(folder, "run", "long.yaml")
    resumed = wait_for_checkpoint(folder, after=checkpoint)
    assert int(resumed.name.removeprefix("step-")) >= int(checkpoint.name.removeprefix("step-"))
    events = resumed.parents[2] / "runtime" / "events.jsonl"
    until(lambda: events.exists() and '"resumed"' in events.read_text(), 240)

    # A second command joins the run. Its Ctrl-C does not stop the stage of the first.
    joined = Command(folder, "run", "long.yaml")
    until(lambda: "joined 0" in joined.said, 240)
    joined.interrupt()
    _, err = joined.finish(130)
    assert workers(folder)

    # The second Ctrl-C exits at once, and the stage still stops.
    again.interrupt()
    until(lambda: "press Ctrl-C again to exit now" in again.said, 240)
    again.interrupt()
    _, err = again.finish(130)
    assert err.endswith("error: interrupted\n")
    Command(folder, "reconcile").finish()
    until(lambda: not workers(folder), 240)
    states = json.loads(Command(folder, "runs", "--json").finish()[0])["runs"]
    assert [run["state"] for run in states if run["stage"] == "long"] == ["cancelled"]


def test_run_detach_continues_in_the_background(first: tuple[dict, str], folder: Path) -> None:
    out, _ = Command(folder, "run", "small.yaml", "--set", "base.tasks=2", "--detach", "--json").finish()
    started = json.loads(out)
    assert os.getsid(started["pid"]) == started["pid"]
    out, _ = Command(folder, "run", "small.yaml", "--set", "base.tasks=2", "--json").finish()
    document = json.loads(out)
    assert document["experiment_id"] == started["experiment_id"]
    assert document["evaluations"][0]["tasks"] == 2
    until(lambda: has_ended(started["pid"]), 240)
    assert "[base] done" in Path(started["log"]).read_text()


def wait_for_checkpoint(folder: Path, after: Path | None = None) -> Path:
    """Wait for the newest complete checkpoint of the long stage, in another attempt than `after`."""
    found: list[Path] = []

    def look() -> bool:
        runs = folder / "home" / "runs"
        found[:] = sorted(runs.glob("*/attempts/*/artifacts/checkpoints/step-*"), key=lambda path: path.name)
        found[:] = [path for path in found if after is None or path.parents[2] != after.parents[2]]
        return bool(found)

    until(look, 240)
    return found[-1]


def has_ended(pid: int) -> bool:
    """Whether the process has ended; a zombie counts as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(happened, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"timed out after {seconds:g} s"
        time.sleep(0.05)
