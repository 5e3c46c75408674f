"""Commands about a store for evidence beyond this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perilune.cli.arguments import RUN_HELP, Json, command_group, open_control, run_names
from perilune.cli.output import echo, print_json
from perilune.errors import RequestError

app = command_group("Keep evidence beyond this machine: in a folder or a bucket, by content.")
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="URL", help="A folder, or s3://bucket/folder; default $PERILUNE_ARTIFACTS."
    ),
]


@app.command(epilog="Example: perilune artifacts push rl --store s3://bucket/evidence")
def push(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help=f"{RUN_HELP} Default: all.", autocompletion=run_names),
    ] = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Send the evidence of a succeeded run, or of all that are not there yet. Contents are sent once."""
    from perilune.control.evidence.artifact_store import ArtifactStore
    from perilune.control.queries.lookup import find_run, terminal_runs

    there = ArtifactStore.chosen(store)
    control = open_control()
    kept = set(there.runs())
    chosen = (
        [find_run(control, run)]
        if run
        else [one for one in terminal_runs(control) if one.state == "succeeded"]
    )
    sent = {}
    for one in chosen:
        if run is None and one.id in kept:
            continue
        sent[one.id] = there.push(control, one)
        if not as_json:
            echo(f"{one.stage} ({one.id}): {sent[one.id]:,} bytes sent")
    if as_json:
        print_json({"store": there.url, "sent": sent})
    elif not sent:
        echo("everything is there")


@app.command(epilog="Example: perilune artifacts pull 01J8ZK4T0Q --out evidence")
def pull(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id of a run, or a unique beginning of one.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to make.")],
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Bring a run's evidence to a new folder, which `perilune verify` checks; the home need not know it."""
    from perilune.control.evidence.artifact_store import ArtifactStore

    there = ArtifactStore.chosen(store)
    fitting = [one for one in there.runs() if one.startswith(run.upper())]
    if len(fitting) != 1:
        what = f"'{run}' fits {len(fitting)} runs" if fitting else f"no run '{run}' is there"
        raise RequestError(what, where=there.url, remedy="perilune artifacts list")
    files = there.pull(fitting[0], out)
    if as_json:
        print_json({"run": fitting[0], "directory": str(out), "files": files})
    else:
        echo(f"{files} files in {out}\n  next: perilune verify {out}")


@app.command("list", epilog="Example: perilune artifacts list --store /mnt/share")
def list_runs(store: StoreOption = None, as_json: Json = False) -> None:
    """Say which runs are there."""
    from perilune.control.evidence.artifact_store import ArtifactStore

    there = ArtifactStore.chosen(store)
    found = there.runs()
    if as_json:
        print_json({"store": there.url, "runs": found})
    else:
        echo("\n".join(found) or "no runs yet")
