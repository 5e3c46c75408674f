"""Commands that move the artifacts of runs: to remote storage and back, and from their machines."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from perilune.cli.arguments import (
    RUN_HELP,
    Json,
    RunArgument,
    check_output_folder,
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
        "--store",
        metavar="URL",
        help="The store: a folder, or s3://bucket/folder. Default: $PERILUNE_ARTIFACTS.",
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
        else [record for record in list_ended_runs(control) if record.state == "succeeded"]
    )
    sent = {}
    for record in chosen:
        if run is None and record.id in stored:
            continue
        sent[record.id] = remote.push(control, record)
        if not as_json:
            echo(f"{record.stage} ({record.id}): {sent[record.id]:,} bytes uploaded")
    if as_json:
        print_json({"store": remote.url, "sent": sent})
    elif not sent:
        echo("the store has every succeeded run")


@app.command(epilog="Example: perilune artifacts pull 01J8ZK4T0Q --out evidence")
def pull(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Id of the run, or the first characters of the id.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", callback=check_output_folder, help="New folder.")],
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Download the artifacts, logs and results of a run to a new folder.

    `perilune verify` checks the folder. The run may come from another home.
    """
    from perilune.control.evidence.artifact_store import ArtifactStore
    from perilune.control.record.home import Home

    remote = ArtifactStore.open(store)
    fitting = [run_id for run_id in remote.runs() if run_id.startswith(run.upper())]
    if len(fitting) != 1:
        what = f"'{run}' matches {len(fitting)} runs" if fitting else f"the store has no run '{run}'"
        raise RequestError(what, where=remote.url, remedy="perilune artifacts list")
    files = remote.pull(Home.open(), fitting[0], out)
    if as_json:
        print_json({"run": fitting[0], "directory": str(out), "files": files})
    else:
        echo(f"{files} files in {out}\n  next: perilune verify {shlex.quote(str(out))}")


@app.command("list", epilog="Example: perilune artifacts list --store /mnt/share")
def list_runs(store: StoreOption = None, as_json: Json = False) -> None:
    """List the runs in the store."""
    from perilune.control.evidence.artifact_store import ArtifactStore

    remote = ArtifactStore.open(store)
    runs = remote.runs()
    if as_json:
        print_json({"store": remote.url, "runs": runs})
    else:
        echo("\n".join(runs) or "no runs yet")


def collect(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", callback=check_output_folder, help="Also copy the files to this new folder."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Download the artifacts of a run from its machine and check that they are complete.

    \b
    perilune collect rl --out rl-artifacts
    """
    from perilune.control.runs.requests import collect_evidence

    control, record = open_run(run)
    files = collect_evidence(control, record.id, out)
    folder = out or control.directory(record)
    if as_json:
        listed = [str(file) for file in files]
        print_json({"run": record.id, "stage": record.stage, "directory": str(folder), "files": listed})
    else:
        echo(f"{record.stage}: {len(files)} files in {folder}, complete")
