"""`perilune report`: an experiment or a run as a self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perilune.cli.output import echo
from perilune.errors import RequestError
from perilune.files import read_json
from perilune.ui.report import build_report
from perilune.ui.view import ExperimentView, StageView, view_folder

if TYPE_CHECKING:
    from perilune.control.queries.lookup import StageStatus
    from perilune.control.runs.experiments import Control

PATHS = (".", "/", "~")  # a target that starts so is a path


def report(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPERIMENT|RUN...",
            help="An experiment or run of `perilune runs`, a sweep, or a folder of attempts.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Write a self-contained HTML report. For several experiments or a sweep, it compares them.

    \b
    perilune report quickstart --out report.html
    perilune report 01JQ8 01JQ9 --out comparison.html
    """
    written = _compared(targets, out) or build_report(view_of(targets[0]), out)
    echo(f"{written} ({written.stat().st_size / 1e6:.1f} MB)")


def _compared(targets: Sequence[str], out: Path) -> Path | None:
    """The page that compares several experiments, or the arms of one sweep; None for one experiment."""
    from perilune.control.queries.comparison import compare_experiments
    from perilune.control.runs.experiments import Control
    from perilune.control.runs.sweeps import find_sweep
    from perilune.ui.comparison import build_comparison

    if len(targets) == 1 and targets[0].startswith(PATHS):
        return None
    control = Control()
    if len(targets) == 1 and find_sweep(control, targets[0]) is None:
        return None
    return build_comparison(compare_experiments(control, targets), out)


def view_of(target: str) -> ExperimentView:
    """The view of a folder, of an experiment with all its stages, or of a run as its only stage.

    Raises:
        RequestError: when `target` is none of them.
    """
    from perilune.control.queries.lookup import find_experiment, find_run, stage_statuses
    from perilune.control.runs.experiments import Control

    if target.startswith(PATHS):
        return view_folder(Path(target).expanduser())
    control = Control()
    try:
        experiment = find_experiment(control, target)
        return experiment_view(control, experiment.id, stage_statuses(control, [experiment.id]))
    except RequestError as no_experiment:
        try:
            run = find_run(control, target)
        except RequestError:
            if Path(target).is_dir():
                return view_folder(Path(target))
            raise no_experiment from None
    statuses = [one for one in stage_statuses(control, [run.experiment_id]) if one.run_id == run.id]
    return experiment_view(control, run.experiment_id, statuses)


def experiment_view(control: Control, experiment_id: str, statuses: Sequence[StageStatus]) -> ExperimentView:
    """What the report needs to know about an experiment and the stages in `statuses`."""
    import yaml

    document = read_json(control.home.experiment(experiment_id) / "recipe.json")
    stages = tuple(
        StageView(one.name, one.task, one.run_id, one.state, one.attempt_dir, one.attempts, one.cause)
        for one in statuses
    )
    recipe = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return ExperimentView(str(document["name"]), int(document["seed"]), recipe, stages)
