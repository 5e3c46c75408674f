"""Commands about trust: is everything as it was recorded and signed, and handing a run to somebody else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perilune.cli.arguments import Json, RunArgument, look_around, open_control
from perilune.cli.output import echo, print_json
from perilune.errors import RequestError

WHAT = "Run, or folder that `perilune export` made. Default: the record and all runs of this home."


def verify(
    what: Annotated[str | None, typer.Argument(metavar="RUN|FOLDER", help=WHAT)] = None,
    key: Annotated[
        Path | None, typer.Option(help="Public key you trust (default for a folder: the one in it).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what is not as it was recorded and signed: files, statements, the record. Needs no network.

    Leaves with 1 when anything differs. A folder that comes with its own key only proves that its parts
    belong together; who made it is proven with --key and a key that came another way.

    \b
    perilune verify
    perilune verify rl
    perilune verify ./rl-export --key sender.pub
    """
    folder = Path(what) if what is not None else None
    if folder is not None and (folder / "attestations").is_dir():
        problems = _folder(folder, key)
    elif key is not None:
        raise RequestError("--key is for exported folders; runs of this home have its key", where=str(what))
    else:
        problems = _home(what)
    broken = {name: found for name, found in problems.items() if found}
    if as_json:
        print_json({"verified": sorted(problems), "whole": not broken, "problems": broken})
    else:
        for name, found in broken.items():
            for problem in found:
                echo(f"{name}: {problem}")
        echo(f"{len(problems) - len(broken)} of {len(problems)} verified" if broken else _praise(problems))
    if broken:
        raise typer.Exit(1)


def _praise(problems: dict[str, list[str]]) -> str:
    names = list(problems)
    return f"verified: {names[0] if len(names) == 1 else f'{len(names)} records'}, all as recorded and signed"


def _folder(folder: Path, key: Path | None) -> dict[str, list[str]]:
    from perilune.bundle.attested import Evidence, tampered
    from perilune.bundle.envelope import PUBLIC

    return {str(folder): list(tampered(Evidence.exported(folder, key or folder / PUBLIC)))}


def _home(reference: str | None) -> dict[str, list[str]]:
    from perilune.control.evidence.verification import damage, record_problem, run_problems, unrecorded
    from perilune.control.queries.lookup import find_run, terminal_runs
    from perilune.control.record.database import REPAIR

    control = open_control(look=False)
    if problem := damage(control.store):
        return {"the record": [problem]}
    look_around(control)
    runs = terminal_runs(control) if reference is None else [find_run(control, reference)]
    found = {"the record of events": [problem] if (problem := record_problem(control)) else []}
    for run_id in unrecorded(control.home, control.store):
        found[f"run {run_id}"] = [f"is not in the record\n  try: {REPAIR}"]
    return found | {f"{run.stage} ({run.id})": list(run_problems(control, run)) for run in runs}


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to make.")],
    ro_crate: Annotated[
        bool, typer.Option("--ro-crate", help="Also describe it as a Process Run Crate (RO-Crate 1.1).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Hand a run over: bundle and evidence, signed statements about both, and the key to check them with.

    \b
    perilune export rl --out rl-export
    perilune export rl --out rl-export --ro-crate
    """
    from perilune.control.evidence.verification import export as hand_over
    from perilune.control.queries.lookup import find_run

    control = open_control()
    found = find_run(control, run)
    hand_over(control, found, out, crate=ro_crate)
    if as_json:
        print_json({"run": found.id, "stage": found.stage, "directory": str(out)})
    else:
        echo(f"{found.stage}: in {out}\n  next: perilune verify {out}")
