"""`perilune gc`: what a home takes on disk, and removing what nothing needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from perilune.cli.arguments import Json, open_control
from perilune.cli.curve import size
from perilune.cli.output import as_markup, echo, print_json

if TYPE_CHECKING:
    from perilune.control.evidence.disk import Removable, Use


def gc(
    yes: Annotated[bool, typer.Option("--yes", help="Remove it; otherwise it is only listed.")] = False,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Also intermediate checkpoints of runs that succeeded.")
    ] = False,
    unused_days: Annotated[
        float, typer.Option("--unused-days", min=0, help="Environments no bundle has begun in for so long.")
    ] = 30.0,
    as_json: Json = False,
) -> None:
    """Say what uses the disk of this home, and what of it nothing needs; remove that with --yes.

    Attempts go that have ended, whose evidence is home, and that a later attempt of the run has replaced; and
    environments that are out of use. With --checkpoints also what training of succeeded runs would resume
    from; their final checkpoints stay, and `perilune verify` knows that the others went on purpose.
    Bundles, results and what was exported are never touched.

    \b
    perilune gc
    perilune gc --checkpoints --yes
    """
    from perilune.control.evidence.disk import others, removable, remove, uses
    from perilune.control.record.home import Home

    if yes:
        Home.chosen().release_reserve()  # room to record what goes
    control = open_control()
    found = uses(control)
    beside = {name: count for name, count in others(control.home).items() if count}
    chosen = removable(control, checkpoints=checkpoints, unused_days=unused_days)
    if not as_json:
        _print_uses(found)
        for name, count in beside.items():
            echo(f"{size(count):>10}  {name}")
        total = sum(use.bytes for use in found) + sum(beside.values())
        echo(f"{size(total):>10}  in all, in {control.home.root}")
    removed = list(remove(control, chosen)) if yes else []
    if as_json:
        print_json(
            {
                "home": str(control.home.root),
                "runs": [asdict(use) | {"bytes": use.bytes} for use in found],
                "others": beside,
                "removable": [asdict(one) for one in chosen],
                "removed": [asdict(one) for one in removed],
            }
        )
        return
    _print_removable(removed if yes else chosen)
    _print_end(chosen, removed, yes=yes, checkpoints=checkpoints)


def _print_end(
    chosen: Sequence[Removable], removed: Sequence[Removable], *, yes: bool, checkpoints: bool
) -> None:
    if not chosen:
        more = "" if checkpoints else "; --checkpoints looks at intermediate checkpoints too"
        echo(f"nothing to remove{more}")
    elif yes:
        left = len(chosen) - len(removed)
        used = f"; {left} are in use just now and stay" if left else ""
        echo(f"removed {size(sum(one.bytes for one in removed))}{used}")
    else:
        option = " --checkpoints" if checkpoints else ""
        echo(f"{size(sum(one.bytes for one in chosen))} can be removed: perilune gc{option} --yes")


def _print_uses(found: Sequence[Use]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    table = Table(box=None, pad_edge=False)
    table.add_column("experiment/stage", overflow="fold")
    table.add_column("run", no_wrap=True)
    for name in ("bundle", "attempts", "checkpoints"):
        table.add_column(name, justify="right", no_wrap=True)
    for use in found:
        named = as_markup(f"{use.experiment}/{use.stage}")
        attempts = use.attempts + use.reproductions
        table.add_row(named, use.run_id, size(use.bundle), size(attempts), size(use.checkpoints))
    if found:
        console.print(table)


def _print_removable(chosen: Sequence[Removable]) -> None:
    for one in chosen:
        what = {
            "attempt": f"attempt {one.epoch} of {one.run_id}",
            "checkpoints": f"{len(one.names)} intermediate checkpoints of {one.run_id}",
        }.get(one.kind, f"environment {one.path.name}")
        echo(f"{size(one.bytes):>10}  {what}\n            {one.why}")
