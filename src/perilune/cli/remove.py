"""`perilune rm`: remove an experiment with its runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from perilune.cli.arguments import Json, open_control
from perilune.cli.curve import size
from perilune.cli.output import echo, print_json

if TYPE_CHECKING:
    from perilune.control.runs.removal import Removal


def rm(
    experiment: Annotated[
        str,
        typer.Argument(
            metavar="EXPERIMENT",
            help="Name (the latest of it), id, or the beginning of an id.",
            show_default=False,
        ),
    ],
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove it. Without this, only list what would go.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove an experiment: its record, runs, checkpoints and report.

    Prints first what goes and what depends on it. A run that another experiment also uses stays, and that
    experiment owns it from then on. Refused while a run or a rented machine of the experiment is live.
    Events, the cost of machines and copies in remote storage stay.

    \b
    perilune rm quickstart
    perilune rm quickstart --yes
    """
    from perilune.control.queries.lookup import find_experiment
    from perilune.control.record.home import Home
    from perilune.control.runs.removal import bytes_of, plan_removal, remove_experiment
    from perilune.errors import RequestError

    if yes:
        Home.chosen().release_reserve()  # room to record what goes
    control = open_control()
    found = find_experiment(control, experiment)
    removal = plan_removal(control, found.id)
    freed = bytes_of(control, removal)
    if not as_json:
        _print_removal(removal, freed)
    if removal.blockers:
        what, remedy = removal.blockers[0]
        raise RequestError(f"{found.name} cannot be removed now: {what}", where=found.id, remedy=remedy)
    if yes:
        removal = remove_experiment(control, found.id)
    if as_json:
        runs = [run.id for run in removal.runs]
        document = {"experiment": found.id, "name": found.name, "runs": runs, "kept": removal.kept}
        print_json(document | {"copied": list(removal.copied), "bytes": freed, "removed": yes})
    else:
        echo(f"removed {found.name}" if yes else f"nothing is removed yet: perilune rm {experiment} --yes")


def _print_removal(removal: Removal, freed: int) -> None:
    echo(f"{removal.experiment.name} ({removal.experiment.id}): {len(removal.runs)} runs, {size(freed)}")
    for run in removal.runs:
        echo(f"  goes   {run.stage}, {run.state}, run {run.id}")
    for run_id, heir in removal.kept.items():
        echo(f"  stays  run {run_id}: experiment {heir} uses it")
    for name in removal.copied:
        echo(f"  note   {name} started from one of these checkpoints; its bundles have copies")
