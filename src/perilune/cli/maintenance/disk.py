"""`perilune gc` and `perilune rm`: show disk usage, and delete files and experiments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from perilune.cli.arguments import Json, open_control
from perilune.cli.output import as_markup, echo, make_console, print_json
from perilune.control.record.home import Home
from perilune.errors import RequestError
from perilune.plural import plural
from perilune.units import format_size

if TYPE_CHECKING:
    from perilune.control.evidence.disk import DiskUsage, Removable
    from perilune.control.runs.removal import Removal


def gc(
    yes: Annotated[bool, typer.Option("--yes", help="Delete the listed files.")] = False,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Also delete intermediate checkpoints of succeeded runs.")
    ] = False,
    unused_days: Annotated[
        float,
        typer.Option(
            "--unused-days", min=0, help="Days after which an unused Python environment is deleted."
        ),
    ] = 30.0,
    as_json: Json = False,
) -> None:
    """Show the disk usage of this home and the files that no run needs; delete those with --yes.

    Deletes ended attempts that a later attempt has replaced, and unused Python environments. With
    --checkpoints, also deletes the intermediate checkpoints of succeeded runs; their final checkpoints stay,
    and `perilune verify` accepts the deletion. Bundles, results and exported folders always stay.

    \b
    perilune gc
    perilune gc --checkpoints --yes
    """
    from perilune.control.evidence.disk import disk_usage, find_removable, other_usage, remove_items

    if yes:
        Home.locate().release_reserve()  # disk space to record the deletion
    control = open_control()
    uses = disk_usage(control)
    beside = {name: count for name, count in other_usage(control.home).items() if count}
    chosen = find_removable(control, checkpoints=checkpoints, unused_days=unused_days)
    if not as_json:
        _print_uses(uses)
        for name, count in beside.items():
            echo(f"{format_size(count):>10}  {name}")
        total = sum(use.bytes for use in uses) + sum(beside.values())
        echo(f"{format_size(total):>10}  total in {control.home.root}")
    removed = list(remove_items(control, chosen)) if yes else []
    if as_json:
        from perilune.control.queries.lookup import rename_run_id

        fields = partial(asdict, dict_factory=rename_run_id)
        print_json(
            {
                "home": str(control.home.root),
                "runs": [fields(use) | {"bytes": use.bytes} for use in uses],
                "others": beside,
                "removable": [fields(item) for item in chosen],
                "removed": [fields(item) for item in removed],
            }
        )
        return
    _print_removable(removed if yes else chosen)
    _print_end(chosen, removed, yes=yes, checkpoints=checkpoints)


def _print_end(
    chosen: Sequence[Removable], removed: Sequence[Removable], *, yes: bool, checkpoints: bool
) -> None:
    if not chosen:
        more = "" if checkpoints else "; --checkpoints also considers intermediate checkpoints"
        echo(f"nothing to delete{more}")
    elif yes:
        left = len(chosen) - len(removed)
        used = f"; kept {left} that are in use" if left else ""
        echo(f"deleted {format_size(sum(item.bytes for item in removed))}{used}")
    else:
        option = " --checkpoints" if checkpoints else ""
        echo(f"{format_size(sum(item.bytes for item in chosen))} can be deleted: perilune gc{option} --yes")


def _print_uses(uses: Sequence[DiskUsage]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("experiment/stage", overflow="fold")
    table.add_column("run", no_wrap=True)
    for name in ("bundle", "attempts", "checkpoints"):
        table.add_column(name, justify="right", no_wrap=True)
    for use in uses:
        label = as_markup(f"{use.experiment}/{use.stage}")
        attempts = use.attempts + use.reproductions
        table.add_row(
            label, use.run_id, format_size(use.bundle), format_size(attempts), format_size(use.checkpoints)
        )
    if uses:
        make_console().print(table)


def _print_removable(chosen: Sequence[Removable]) -> None:
    for item in chosen:
        label = {
            "attempt": f"attempt {item.epoch} of {item.run_id}",
            "checkpoints": f"{plural(len(item.names), 'intermediate checkpoint')} of {item.run_id}",
        }.get(item.kind, f"environment {item.path.name}")
        echo(f"{format_size(item.bytes):>10}  {label}\n            {item.why}")


def rm(
    experiment: Annotated[
        str,
        typer.Argument(
            metavar="EXPERIMENT", help="Name, id, or first characters of the id.", show_default=False
        ),
    ],
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove it. Without --yes, only list what would be removed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove an experiment: its record, runs, checkpoints and report.

    First lists what would be removed and what depends on it. A run that another experiment uses is kept, and
    then belongs to that experiment. The command refuses while a run or a rented machine of the experiment is
    live. Events, the cost of machines and copies in remote storage are kept.

    \b
    perilune rm quickstart
    perilune rm quickstart --yes
    """
    from perilune.control.queries.lookup import find_experiment
    from perilune.control.runs.removal import plan_removal, removal_bytes, remove_experiment

    if yes:
        Home.locate().release_reserve()  # disk space to record the deletion
    control = open_control()
    record = find_experiment(control, experiment)
    removal = plan_removal(control, record.id)
    freed = removal_bytes(control, removal)
    if not as_json:
        _print_removal(removal, freed)
    if removal.blockers:
        what, remedy = removal.blockers[0]
        raise RequestError(f"{record.name} cannot be removed now: {what}", where=record.id, remedy=remedy)
    if yes:
        removal = remove_experiment(control, record.id)
    if as_json:
        runs = [run.id for run in removal.runs]
        document = {"experiment_id": record.id, "name": record.name, "runs": runs, "kept": removal.kept}
        print_json(document | {"copied": list(removal.copied), "bytes": freed, "removed": yes})
    else:
        echo(f"removed {record.name}" if yes else f"to remove it: perilune rm {experiment} --yes")


def _print_removal(removal: Removal, freed: int) -> None:
    runs = plural(len(removal.runs), "run")
    echo(f"{removal.experiment.name} ({removal.experiment.id}): {runs}, {format_size(freed)}")
    for run in removal.runs:
        echo(f"  remove {run.stage}, {run.state}, run {run.id}")
    for run_id, heir in removal.kept.items():
        echo(f"  keep   run {run_id}: experiment {heir} uses it")
    for name in removal.copied:
        echo(f"  note   {name} started from one of these checkpoints; its bundles have copies of them")
