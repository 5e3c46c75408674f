"""`perilune report`: an experiment or a run as a self-contained HTML file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from perilune.cli.arguments import check_output_file
from perilune.cli.output import echo
from perilune.errors import WorkFailedError
from perilune.ui.report import build_report


def report(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPERIMENT|RUN...",
            help="Experiments or runs that `perilune runs` lists, sweeps, or folders of attempts.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", callback=check_output_file, help="HTML file to write.")
    ] = Path("report.html"),
) -> None:
    """Write a self-contained HTML report. For several experiments or a sweep, the report compares them.

    \b
    perilune report quickstart --out report.html
    perilune report 01JQ8 01JQ9 --out comparison.html
    """
    from perilune.ui.experiment import view_target

    try:
        written = _comparison_page(targets, out) or build_report(view_target(targets[0]), out)
    except FileNotFoundError as error:
        what = f"{error.filename} was deleted while the report read it"
        raise WorkFailedError(what, remedy="run the command again") from None
    echo(f"{written} ({written.stat().st_size / 1e6:.1f} MB)")


def _comparison_page(targets: Sequence[str], out: Path) -> Path | None:
    """Build the page that compares experiments, or the arms of a sweep; None for one experiment."""
    from perilune.control.queries.comparison import compare_experiments
    from perilune.control.runs.experiments import Control
    from perilune.control.runs.sweeps import find_sweep
    from perilune.ui.experiment import PATH_PREFIXES
    from perilune.ui.experiment_comparison import build_comparison

    if len(targets) == 1 and targets[0].startswith(PATH_PREFIXES):
        return None
    control = Control()
    if len(targets) == 1 and find_sweep(control, targets[0]) is None:
        return None
    return build_comparison(compare_experiments(control, targets), out)
