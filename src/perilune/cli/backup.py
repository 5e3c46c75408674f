"""Commands that keep what a home remembers: copy it, put it back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perilune.cli.arguments import Json, open_control
from perilune.cli.output import echo, print_json


def backup(
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to make.")],
    evidence: Annotated[
        bool, typer.Option("--evidence", help="Also copy all bundles and attempts, which may be large.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Copy the record, keys, recipes and templates of this home to a new folder, while it is in use.

    \b
    perilune backup /media/disk/perilune-friday
    perilune backup everything --evidence
    """
    from perilune.control.record.backup import back_up

    control = open_control(look=False)
    back_up(control.store, control.home, out, evidence=evidence)
    if as_json:
        print_json({"backup": str(out), "evidence": evidence})
    else:
        echo(f"in {out}\n  put it back with: PERILUNE_HOME=NEW perilune restore {out}")


def restore(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that `perilune backup` made.")],
    as_json: Json = False,
) -> None:
    """Make a new home (PERILUNE_HOME) what another was when a backup was made.

    The new home has a name of its own. Runs that were under way stay the original's, and no command of the
    new home acts on them. If the original is gone, `perilune adopt` takes them over.

    \b
    PERILUNE_HOME=new-home perilune restore /media/disk/perilune-friday
    """
    from perilune.control.record.backup import restore as put_back
    from perilune.control.record.home import Home

    home = Home.chosen()
    found = put_back(folder, home)
    if as_json:
        print_json({"home": str(home.root), "backup": str(folder), "inherited": sorted(found.runs)})
        return
    echo(f"{home.root} is as the original was, and a home of its own")
    if found.runs:
        runs = "1 run" if len(found.runs) == 1 else f"{len(found.runs)} runs"
        echo(f"  the original keeps {runs} that had not ended; if that home is gone: perilune adopt")


def rebuild(as_json: Json = False) -> None:
    """Make a damaged or lost record again from the bundles, attempts and signed results on the disk.

    Runs, attempts, results and settled evidence come back. Events, wishes to cancel, the remaining stages of
    experiments and the costs of machines do not. The damaged database is kept.

    \b
    perilune rebuild
    """
    from perilune.control.record.home import Home
    from perilune.control.record.rebuild import rebuild as make_again

    found = make_again(Home.open())
    aside = "" if found.aside is None else str(found.aside)
    if as_json:
        print_json({"runs": dict(found.runs), "skipped": found.skipped, "aside": aside})
        return
    states = ", ".join(f"{count} {state}" for state, count in sorted(found.runs.items())) or "none"
    echo(f"runs: {states}")
    for problem in found.skipped:
        echo(f"not rebuilt: {problem}")
    echo("lost: events, wishes to cancel, remaining stages of experiments, costs of machines")
    if aside:
        echo(f"kept: {aside}")
    echo("  next: perilune verify, then perilune reconcile")


def adopt(as_json: Json = False) -> None:
    """Take over the runs and rented machines of the home that this one was restored from.

    Only if that home is gone: from now on, commands here act on them.

    \b
    perilune adopt
    """
    from perilune.control.record.identity import adopt as take_over

    control = open_control(look=False)
    found = take_over(control.home, control.store)
    if as_json:
        print_json({"homes": list(found.homes), "runs": sorted(found.runs)})
    else:
        runs = "1 run is" if len(found.runs) == 1 else f"{len(found.runs)} runs are"
        echo(f"{runs} this home's now\n  next: perilune reconcile")
