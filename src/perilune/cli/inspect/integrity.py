"""Commands that check signatures, and export a run with signed statements."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from perilune.cli.arguments import (
    Json,
    RunArgument,
    check_output_folder,
    open_control,
    open_run,
    refresh_state,
)
from perilune.cli.output import echo, print_json
from perilune.errors import RequestError
from perilune.plural import plural

TARGET = (
    "A run, which is checked together with the recorded events of the home, or a folder that "
    "`perilune export` made. Default: the database, the events and all ended runs of this home."
)


def verify(
    target: Annotated[str | None, typer.Argument(metavar="RUN|FOLDER", help=TARGET)] = None,
    key: Annotated[
        Path | None, typer.Option(help="Public key that you trust. Default for a folder: the key in it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check files, signed statements and recorded events against their signatures. Needs no network.

    Exits with 1 when anything differs. An exported folder that is checked with its own key is consistent, but
    anyone may have made it. To prove who made it, pass --key with a key that you received separately.

    \b
    perilune verify
    perilune verify rl
    perilune verify ./rl-export --key sender.pub
    """
    from perilune.bundle.attested import Evidence, attestation_problems
    from perilune.bundle.envelope import PUBLIC

    folder = Path(target) if target is not None else None
    if folder is not None and (folder / "attestations").is_dir():
        evidence = Evidence.from_export(folder, key or folder / PUBLIC)
        problems = {str(folder): list(attestation_problems(evidence))}
    elif key is not None:
        raise RequestError(
            "--key applies to exported folders; runs are checked with the key of this home", where=str(target)
        )
    else:
        problems = _verify_home(target)
    broken = {name: differences for name, differences in problems.items() if differences}
    if as_json:
        print_json({"verified": sorted(problems), "whole": not broken, "problems": broken})
    else:
        for name, differences in broken.items():
            for problem in differences:
                echo(f"{name}: {problem}")
        first, *runs = problems
        counted = runs if len(runs) < 2 else [plural(len(runs), "ended run")]
        all_verified = f"verified: {' and '.join([first, *counted])}"
        echo(f"{len(problems) - len(broken)} of {len(problems)} verified" if broken else all_verified)
    if broken:
        raise typer.Exit(1)


def _verify_home(reference: str | None) -> dict[str, list[str]]:
    from perilune.control.evidence.verification import (
        find_damage,
        find_record_problem,
        find_run_problems,
        find_unrecorded_runs,
    )
    from perilune.control.queries.lookup import find_run, list_ended_runs
    from perilune.control.record.database import REPAIR_REMEDY

    control = open_control(refresh=False)
    if problem := find_damage(control.store):
        return {"the database": [problem]}
    refresh_state(control)
    runs = list_ended_runs(control) if reference is None else [find_run(control, reference)]
    problems = {"the recorded events": [problem] if (problem := find_record_problem(control)) else []}
    for run_id in find_unrecorded_runs(control.home, control.store):
        problems[f"run {run_id}"] = [f"is not in the database\n  try: {REPAIR_REMEDY}"]
    return problems | {f"{run.stage} ({run.id})": list(find_run_problems(control, run)) for run in runs}


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", "-o", callback=check_output_folder, help="New folder.")],
    ro_crate: Annotated[
        bool, typer.Option("--ro-crate", help="Also write Process Run Crate metadata (RO-Crate 1.1).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Export a run to a folder: bundle, artifacts, logs, signed statements, and the public key to check them.

    \b
    perilune export rl --out rl-export
    perilune export rl --out rl-export --ro-crate
    """
    from perilune.control.evidence.verification import export as export_run

    control, record = open_run(run)
    export_run(control, record, out, crate=ro_crate)
    if as_json:
        print_json({"run": record.id, "stage": record.stage, "directory": str(out)})
    else:
        echo(f"exported {record.stage} to {out}\n  next: perilune verify {shlex.quote(str(out))}")
