"""Commands that move the artifacts of runs: to remote storage and back, and from their machines."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from perilune.cli.arguments import (
    RUN_HELP,
    Json,
    RunArgument,
    complete_run_names,
    make_command_group,
    open_control,
    open_run,
)
from perilune.cli.output import echo, print_json
from perilune.errors import RequestError

app = make_command_group("Store the artifacts of runs in remote storage: a folder or a bucket.")
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="URL", help="A folder or s3://bucket/folder. Default: $PERILUNE_ARTIFACTS."
    ),
]


@app.command(epilog="Example: perilune artifacts push rl --store s3://bucket/evidence")
def push(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help=f"{RUN_HELP} Default: all succeeded runs.", autocompletion=complete_run_names
        ),
    ] = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Upload the artifacts, logs and results of one run, or of all succeeded runs.

    Runs that the store already has are skipped, and equal files are uploaded once.
    """
    from perilune.control.evidence.artifact_store import ArtifactStore
    from perilune.control.queries.lookup import find_run, list_ended_runs

    remote = ArtifactStore.open(store)
    control = open_control()
    stored = set(remote.runs())
    chosen = (
        [find_run(control, run)]
        if run
        else [one for one in list_ended_runs(control) if one.state == "succeeded"]
    )
    sent = {}
    for one in chosen:
        if run is None and one.id in stored:
            continue
        sent[one.id] = remote.push(control, one)
        if not as_json:
            echo(f"{one.stage} ({one.id}): {sent[one.id]:,} bytes uploaded")
    if as_json:
        print_json({"store": remote.url, "sent": sent})
    elif not sent:
        echo("the store has every succeeded run")


@app.command(epilog="Example: perilune artifacts pull 01J8ZK4T0Q --out evidence")
def pull(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id, or its first characters.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder.")],
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Download the artifacts, logs and results of a run to a new folder.

    `perilune verify` checks the folder. The run may come from another home.
    """
    from perilune.control.evidence.artifact_store import ArtifactStore

    remote = ArtifactStore.open(store)
    fitting = [one for one in remote.runs() if one.startswith(run.upper())]
    if len(fitting) != 1:
        what = f"'{run}' matches {len(fitting)} runs" if fitting else f"the store has no run '{run}'"
        raise RequestError(what, where=remote.url, remedy="perilune artifacts list")
    files = remote.pull(fitting[0], out)
    if as_json:
        print_json({"run": fitting[0], "directory": str(out), "files": files})
    else:
        echo(f"{files} files in {out}\n  next: perilune verify {shlex.quote(str(out))}")


@app.command("list", epilog="Example: perilune artifacts list --store /mnt/share")
def list_runs(store: StoreOption = None, as_json: Json = False) -> None:
    """List the runs in the store."""
    from perilune.control.evidence.artifact_store import ArtifactStore

    remote = ArtifactStore.open(store)
    found = remote.runs()
    if as_json:
        print_json({"store": remote.url, "runs": found})
    else:
        echo("\n".join(found) or "no runs yet")


def collect(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also copy the files to this new folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Download the artifacts of a run from its machine and check that they are complete.

    \b
    perilune collect rl --out rl-artifacts
    """
    from perilune.control.runs.requests import collect_evidence as collect_run

    control, found = open_run(run)
    files = collect_run(control, found.id, out)
    place = out or control.directory(found)
    if as_json:
        listed = [str(file) for file in files]
        print_json({"run": found.id, "stage": found.stage, "directory": str(place), "files": listed})
    else:
        echo(f"{found.stage}: {len(files)} files in {place}, complete")
