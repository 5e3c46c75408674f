"""`perilune track`: a run's figures for TensorBoard, W&B or MLflow, while it goes on or afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perilune.cli.arguments import Json, RunArgument, open_control
from perilune.cli.output import echo, print_json

if TYPE_CHECKING:
    from perilune.control.record.store import Run
    from perilune.control.runs.experiments import Control
    from perilune.tracking import Sink, TrackedRun

LOOK_SECONDS = 2.0  # between two looks of --follow
LAST_SECONDS = 60.0  # that trackers have after the experiment's end


def track(
    run: RunArgument,
    *,
    to: Annotated[str, typer.Option("--to", metavar="NAME", help="tensorboard, wandb or mlflow.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where its files go (default: tracking/NAME at home).")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    tied: Annotated[bool, typer.Option("--tied", hidden=True)] = False,
    as_json: Json = False,
) -> None:
    """Copy a run's figures to TensorBoard, Weights & Biases or MLflow.

    What was copied of the run before is replaced. W&B is offline unless WANDB_MODE is online; MLflow writes
    files unless MLFLOW_TRACKING_URI names a server.

    \b
    perilune track rl --to tensorboard
    perilune track rl --to wandb --follow
    """
    from perilune.control.queries.lookup import find_run
    from perilune.control.record.home import locked
    from perilune.execution.processes import die_with
    from perilune.tracking import open_sink

    if tied:
        die_with(os.getppid())
    control = open_control()
    found = find_run(control, run)
    directory = out or control.home.root / "tracking" / to
    ours = _marker(control, found.id, to)
    ours.mkdir(parents=True, exist_ok=True)
    with locked(ours) as alone:
        if not alone:
            echo(f"{found.stage}: another process is at it")
            return
        sink = open_sink(to, directory, _tracked(control, found))
        steps = _copy(control, found, sink, follow=follow)
    if as_json:
        print_json({"run": found.id, "stage": found.stage, "steps": steps, "look": sink.place})
    else:
        echo(f"{found.stage}: {steps} steps; {sink.place}")


def _copy(control: Control, run: Run, sink: Sink, *, follow: bool) -> int:
    """Copy steps until there are no more; returns how many."""
    from perilune.control.record.transitions import RunState
    from perilune.tracking import Trail

    trail, steps = Trail(sink.after), 0
    while True:
        run = control.run(run.id)
        state = RunState(run.state)
        ended = state.terminal or not follow
        for figures in trail.read(control.directory(run) / "artifacts", ended=ended):
            sink.write(figures)
            steps += 1
        if ended:
            sink.close(failed=state in {RunState.FAILED, RunState.CANCELLED})
            return steps
        time.sleep(LOOK_SECONDS)
        control.reconciler.one(run.id, act=False)


def _tracked(control: Control, run: Run) -> TrackedRun:
    from perilune.bundle.job import Job
    from perilune.control.queries.lookup import run_document
    from perilune.files import read_json
    from perilune.tracking import TrackedRun

    job = Job.model_validate(read_json(control.home.bundle(run.id) / "job.json"))
    environment = {name: value for name, value in job.environment.items() if name != "rewards"}
    terms = job.environment.get("rewards", {})  # of functions the weight alone: their text is nobody's
    rewards = {
        name: term if isinstance(term, float | int) else term["weight"] for name, term in terms.items()
    }
    config = {"task": job.task, "seed": job.seed, "environment": environment, "model": job.model}
    config |= {"rewards": rewards} if rewards else {}
    experiment = run_document(control, run)["experiment"]
    return TrackedRun(run.id, experiment, run.stage, run.created, config | job.spec)


class Trackers:
    """The processes that copy an experiment's figures while it runs, one a run and tracker.

    A tracker that fails is told of once and not tried again, and the experiment goes on. They end with the
    process that began them.
    """

    def __init__(self, control: Control, names: Sequence[str]) -> None:
        self._control, self._names = control, list(names)
        self._going: list[tuple[str, str, Path, subprocess.Popen[bytes]]] = []

    def begin(self, stage: str, run_id: str, *, ended: bool = False) -> None:
        """Track a run to its end; one that has `ended` before only where that was not done."""
        for name in self._names:
            log = _marker(self._control, run_id, name) / "log"
            if ended and log.exists():
                continue
            log.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "perilune.cli.main", "track", run_id, "--to", name]
            with log.open("wb") as out:
                process = subprocess.Popen(
                    [*command, "--follow", "--tied"],
                    stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                )  # fmt: skip
            self._going.append((stage, name, log, process))

    def warnings(self, seconds: float = 0.0) -> Iterator[str]:
        """Which trackers have failed since the last call; waits so long for those that still go on."""
        until = time.monotonic() + seconds
        for one in list(self._going):
            stage, name, log, process = one
            try:
                code = process.wait(max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                continue
            self._going.remove(one)
            if code and name in self._names:
                self._names.remove(name)
                said = log.read_text(errors="replace").strip().splitlines()
                yield f"{name} does not track {stage} or what follows: {' '.join(said[-2:])} (see {log})"


def _marker(control: Control, run_id: str, name: str) -> Path:
    """A run's folder about one tracker: its lock, its log; there once it has begun."""
    return control.home.run(run_id) / "tracking" / name
