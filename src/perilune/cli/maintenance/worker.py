"""`perilune worker`: execute a frozen bundle in place."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from perilune.cli.arguments import Json
from perilune.cli.output import echo, print_json


def worker(
    bundle: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="Folder of a frozen bundle, or of a copy.")
    ],
    epoch: Annotated[
        int | None,
        typer.Option(min=1, help="Number of the attempt. Default: one more than that of the last attempt."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Execute a bundle in its own folder. Remote machines run this command.

    \b
    perilune worker ./bundle
    """
    from perilune.execution.worker import run_bundle

    verdict = run_bundle(bundle, epoch, echo=not as_json)
    if as_json:
        print_json(asdict(verdict))
    elif verdict.succeeded:
        echo(f"succeeded in {verdict.seconds:.1f} s; artifacts in {bundle / 'artifacts'}")
    else:
        echo(f"{verdict.cause}: {verdict.message}", err=True)
    if not verdict.succeeded:
        raise typer.Exit(2 if verdict.cause in {"request_error", "bundle_rejected"} else 1)
