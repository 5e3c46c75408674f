"""`perilune track`: copy the metrics of a run to TensorBoard, W&B or MLflow, during or after the run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perilune.cli.arguments import Json, RunArgument, check_output_folder, open_run
from perilune.cli.output import echo, print_json
from perilune.cli.train.trackers import tracker_folder
from perilune.control.record.transitions import RunState
from perilune.files import locked, read_json
from perilune.tracking import FigureReader, TrackedRun, open_sink

if TYPE_CHECKING:
    from perilune.control.record.store import Run
    from perilune.control.runs.experiments import Control
    from perilune.tracking import Sink, TrackedRun

POLL_SECONDS = 2.0  # seconds between two reads of --follow


def track(
    run: RunArgument,
    *,
    to: Annotated[str, typer.Option("--to", metavar="NAME", help="Tracker: tensorboard, wandb or mlflow.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            callback=check_output_folder,
            help="Folder for the tracker. Default: $PERILUNE_HOME/tracking/NAME.",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Copy until the run ends.")] = False,
    tied: Annotated[bool, typer.Option("--tied", hidden=True)] = False,
    as_json: Json = False,
) -> None:
    """Copy the metrics of a run to TensorBoard, Weights & Biases or MLflow.

    Replaces an earlier copy of the same run. W&B is offline unless WANDB_MODE is online. MLflow writes
    files unless MLFLOW_TRACKING_URI names a server.

    \b
    perilune track rl --to tensorboard
    perilune track rl --to wandb --follow
    """
    from perilune.execution.processes import die_with_parent

    if tied:
        die_with_parent(os.getppid())
    control, record = open_run(run)
    directory = out or control.home.root / "tracking" / to
    folder = tracker_folder(control, record.id, to)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock") as acquired:
        if not acquired:
            echo(f"{record.stage}: another process is copying to {to}")
            if as_json:
                print_json({"run": record.id, "stage": record.stage, "steps": 0, "look": None})
            return
        sink = open_sink(to, directory, _make_tracked_run(control, record))
        steps = _copy(control, record, sink, follow=follow)
    if as_json:
        print_json({"run": record.id, "stage": record.stage, "steps": steps, "look": sink.place})
    else:
        echo(f"{record.stage}: {steps} steps; {sink.place}")


def _copy(control: Control, run: Run, sink: Sink, *, follow: bool) -> int:
    """Copy steps until there are no more; returns their number."""
    trail, steps = FigureReader(sink.after), 0
    while True:
        run = control.run(run.id)
        state = RunState(run.state)
        ended = state.is_terminal or not follow
        for figures in trail.read(control.directory(run) / "artifacts", ended=ended):
            sink.write(figures)
            steps += 1
        if ended:
            sink.close(failed=state in {RunState.FAILED, RunState.CANCELLED})
            return steps
        time.sleep(POLL_SECONDS)
        control.reconciler.reconcile(run.id, act=False)


def _make_tracked_run(control: Control, run: Run) -> TrackedRun:
    from perilune.bundle.job import Job
    from perilune.control.queries.lookup import run_document

    job = Job.model_validate(read_json(control.home.bundle(run.id) / "job.json"))
    environment = {
        name: value for name, value in job.environment.items() if name not in ("rewards", "source")
    }
    terms = job.environment.get("rewards", {})  # without the source text of reward functions
    rewards = {
        name: term if isinstance(term, float | int) else term["weight"] for name, term in terms.items()
    }
    config = {"task": job.task, "seed": job.seed, "environment": environment, "model": job.model}
    config |= {"rewards": rewards} if rewards else {}
    experiment = run_document(control, run)["experiment"]
    return TrackedRun(run.id, experiment, run.stage, run.created, config | job.spec)
