"""perilune report: one experiment or run as a self-contained HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    target: Annotated[
        str, typer.Argument(metavar="EXPERIMENT|RUN", help="Experiment, run, or a folder of attempts.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Write a self-contained HTML report."""
    from perilune.ui.report import build_report
    from perilune.ui.view import view_folder

    path = Path(target)
    written = build_report(view_folder(path), out)
    typer.echo(f"{written} ({written.stat().st_size / 1e6:.1f} MB)")
