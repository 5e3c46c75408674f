"""`perilune data`: look into records and episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from perilune.cli.arguments import command_group
from perilune.cli.output import echo, print_json

app = command_group("Look into data: traces that stages train on, episodes that they leave.")


@app.callback()
def data() -> None:
    """Look into data: traces that stages train on, episodes that they leave."""


@app.command(epilog="Example: perilune data inspect train.jsonl validation.jsonl")
def inspect(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="Records (.jsonl, or a folder of them) or episodes (.parquet)."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check every row; print counts, lengths, scores, duplicates, and the tasks that files share."""
    from perilune.data.inspection import inspect_files

    report = inspect_files(files)
    if as_json:
        print_json(report)
        return
    for figures in report["files"]:
        echo(f"{figures['file']}: {figures['rows']} {figures['kind']}")
        for name, value in figures.items():
            if name not in ("file", "kind", "rows"):
                echo(f"  {name.replace('_', ' '):18} {_words(value)}")
    for pair in report["shared_tasks"]:
        echo(f"{' and '.join(pair['files'])} share {pair['tasks']} tasks")


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items()) or "none"
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
