"""perilune report: one experiment or run as a self-contained HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perilune.cli.output import echo
from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.ui.view import ExperimentView


def report(
    target: Annotated[
        str,
        typer.Argument(
            metavar="EXPERIMENT|RUN",
            help="Experiment or run that `perilune runs` lists, or a folder of attempts.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Write a self-contained HTML report.

    \b
    perilune report quickstart --out report.html
    """
    from perilune.ui.report import build_report

    written = build_report(_view(target), out)
    echo(f"{written} ({written.stat().st_size / 1e6:.1f} MB)")


def _view(target: str) -> ExperimentView:
    """What `target` names: a folder, an experiment with all its stages, or a run as the one stage it is.

    Raises:
        RequestError: when it names none of them.
    """
    from perilune.cli.view import experiment_view
    from perilune.control.queries.lookup import find_experiment, find_run, stage_statuses
    from perilune.control.runs.experiments import Control
    from perilune.ui.view import view_folder

    if target.startswith((".", "/", "~")):
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
