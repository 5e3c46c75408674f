"""Commands that back up a home directory, restore it and repair its database."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from perilune.cli.arguments import Json, check_output_folder, open_control
from perilune.cli.output import echo, print_json
from perilune.control.record.home import Home
from perilune.plural import plural


def backup(
    out: Annotated[Path, typer.Argument(metavar="FOLDER", callback=check_output_folder, help="New folder.")],
    evidence: Annotated[
        bool, typer.Option("--evidence", help="Also copy all bundles and attempts, which may be large.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Copy the database, keys, recipes and templates of this home to a new folder, while it is in use.

    \b
    perilune backup /media/disk/perilune-friday
    perilune backup everything --evidence
    """
    from perilune.control.record.backup import back_up

    control = open_control(refresh=False)
    back_up(control.store, control.home, out, evidence=evidence)
    if as_json:
        print_json({"backup": str(out), "evidence": evidence})
    else:
        echo(f"wrote {out}\n  to restore it: PERILUNE_HOME=NEW perilune restore {shlex.quote(str(out))}")


def restore(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that `perilune backup` made.")],
    as_json: Json = False,
) -> None:
    """Restore a backup to a new home, PERILUNE_HOME.

    The new home has its own identity. Runs that were live still belong to the original home, and commands in
    the new home do not touch them. If the original home is gone, `perilune adopt` takes them over.

    \b
    PERILUNE_HOME=new-home perilune restore /media/disk/perilune-friday
    """
    from perilune.control.record.backup import restore as put_back

    home = Home.locate()
    restored = put_back(folder, home)
    if as_json:
        print_json({"home": str(home.root), "backup": str(folder), "inherited": sorted(restored.runs)})
        return
    echo(f"restored to {home.root}")
    if restored.runs:
        runs = plural(len(restored.runs), "live run")
        echo(f"  the original home keeps {runs}; if that home is gone: perilune adopt")


def rebuild(as_json: Json = False) -> None:
    """Rebuild a damaged or lost database from the bundles, attempts and signed results on disk.

    Restores runs, attempts and results. Events, requests to cancel, the later stages of experiments and the
    cost of machines are lost. The damaged database is kept.

    \b
    perilune rebuild
    """
    from perilune.control.record.rebuild import rebuild as rebuild_database

    rebuilt = rebuild_database(Home.open())
    aside = "" if rebuilt.aside is None else str(rebuilt.aside)
    if as_json:
        print_json({"runs": dict(rebuilt.runs), "skipped": rebuilt.skipped, "aside": aside})
        return
    states = ", ".join(f"{count} {state}" for state, count in sorted(rebuilt.runs.items())) or "none"
    echo(f"runs: {states}")
    for problem in rebuilt.skipped:
        echo(f"not rebuilt: {problem}")
    echo("lost: events, requests to cancel, later stages of experiments, costs of machines")
    if aside:
        echo(f"the damaged database is kept: {aside}")
    echo("  next: perilune verify, then perilune reconcile")


def adopt(as_json: Json = False) -> None:
    """Take over the runs and rented machines of the home that this home was restored from.

    Use it only if that home is gone: from now on, commands in this home act on its runs and machines.

    \b
    perilune adopt
    """
    from perilune.control.record.identity import adopt as take_over

    control = open_control(refresh=False)
    adopted = take_over(control.home, control.store)
    if as_json:
        print_json({"homes": list(adopted.homes), "runs": sorted(adopted.runs)})
    else:
        echo(f"adopted {plural(len(adopted.runs), 'run')}\n  next: perilune reconcile")
