"""Commands about what runs leave: compare, reproduce, hand over; and the one that makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perilune.cli.arguments import RUN_HELP, Json, RunArgument, open_control, show_events
from perilune.cli.output import echo, print_json


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=RUN_HELP)],
    b: Annotated[str, typer.Argument(metavar="B", help=RUN_HELP)],
    as_json: Json = False,
) -> None:
    """Say what differs between two runs: recipe, code, packages, machine, inputs, results.

    \b
    perilune diff quickstart/rl other/rl
    """
    from perilune.bundle.compare import compare_runs
    from perilune.control.queries.lookup import find_run

    control = open_control()
    found = compare_runs(*(control.directory(find_run(control, name)) for name in (a, b)))
    if as_json:
        print_json(found.document())
        return
    for part, changes in found.parts().items():
        echo(f"{part}: {'the same' if not changes else ''}")
        for change in changes:
            echo(f"  {change}")


def reproduce(run: RunArgument, as_json: Json = False) -> None:
    """Run a frozen bundle again and compare metrics, episodes and final checkpoint byte for byte.

    Leaves with 0 only when they are identical.

    \b
    perilune reproduce rl
    """
    from perilune.control.queries.lookup import find_run
    from perilune.control.runs.reproduction import Reproduced
    from perilune.control.runs.reproduction import reproduce as run_again

    control = open_control()
    found = find_run(control, run)
    last = show_events(run_again(control, found.id))
    assert isinstance(last, Reproduced)
    identical = not last.differences
    if as_json:
        differences = [str(difference) for difference in last.differences]
        print_json(
            {"run": found.id, "stage": found.stage, "identical": identical, "differences": differences}
            | ({"directory": str(last.directory)} if last.directory else {})
        )
    elif identical:
        echo(f"{found.stage}: reproduced; everything it computed is identical")
    else:
        echo(f"{found.stage}: not reproduced; the second run is in {last.directory}")
        for difference in last.differences:
            echo(f"  {difference}")
    if not identical:
        raise typer.Exit(1)


def collect(
    run: RunArgument,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also copy it to this new folder.")] = None,
    as_json: Json = False,
) -> None:
    """Bring a run's evidence home and check that it is whole.

    \b
    perilune collect rl --out rl-evidence
    """
    from perilune.control.queries.lookup import find_run
    from perilune.control.runs.requests import collect as collect_run

    control = open_control()
    found = find_run(control, run)
    files = collect_run(control, found.id, out)
    place = out or control.directory(found)
    if as_json:
        listed = [str(file) for file in files]
        print_json({"run": found.id, "stage": found.stage, "directory": str(place), "files": listed})
    else:
        echo(f"{found.stage}: {len(files)} files, whole, in {place}")


def worker(
    bundle: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="Folder of a frozen bundle, or a copy of one.")
    ],
    epoch: Annotated[
        int | None, typer.Option(min=1, help="Number of the attempt (default: one more than was seen).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Execute a bundle here, in place. This is what a remote machine runs.

    \b
    perilune worker ./bundle
    """
    from perilune.execution.worker import run_bundle

    verdict = run_bundle(bundle, epoch, echo=not as_json)
    if as_json:
        print_json(verdict.document())
    elif verdict.succeeded:
        echo(f"succeeded in {verdict.seconds:.1f} s; artifacts in {bundle / 'artifacts'}")
    else:
        echo(f"{verdict.cause}: {verdict.message}", err=True)
    if not verdict.succeeded:
        raise typer.Exit(2 if verdict.cause in {"request_error", "bundle_rejected"} else 1)
