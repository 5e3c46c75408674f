"""`perilune run`: say what a recipe will do, do it or take it up again, show what came of it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perilune.cli.output import echo, print_json
from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.control.experiments import Control
    from perilune.control.templates import Template
    from perilune.recipe.schema import Recipe

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace one key: seed=1, rl.steps=10. May be repeated."),
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="The same as --set seed=N.")]
JsonOption = Annotated[bool, typer.Option("--json", help="End stdout with one JSON document.")]


@dataclass(frozen=True, slots=True)
class Destination:
    """Where runs are to go: a template (None is this machine), and the options that ask for it."""

    template: Template | None = None
    options: tuple[str, ...] = ()


def run(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a bundled recipe.")
    ],
    *,
    set_: SetOption = None,
    seed: SeedOption = None,
    template: Annotated[
        str | None, typer.Option(metavar="ID", help="Where runs go: perilune templates list.")
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="KEY=VALUE", help="Replace one key of the template that it allows."),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print what would be done, and stop.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Go on in the background; return at once.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a recipe. What it finished before is reused; what is under way is joined; the rest is begun.

    Ctrl-C stops the stage that this command began; the same command goes on from its last checkpoint.
    """
    where = _destination(template, with_ or ())
    command = shlex.join(["perilune", "run", recipe, *where.options])
    changes = overrides(set_, seed)
    run_recipe(recipe, changes, command, where=where, plan_only=plan, detach=detach, as_json=as_json)


def _destination(name: str | None, changes: Sequence[str]) -> Destination:
    if name is None:
        if changes:
            raise RequestError("--with changes a template, and there is none", remedy="--template ID")
        return Destination()
    from perilune.control.home import Home
    from perilune.control.templates import load_template

    template = load_template(Home.open(), name, changes)
    return Destination(template, ("--template", name, *(part for one in changes for part in ("--with", one))))


def overrides(set_: Sequence[str] | None, seed: int | None) -> list[str]:
    """What the options `--set` and `--seed` say, as overrides; the seed last."""
    return [*(set_ or ()), *([] if seed is None else [f"seed={seed}"])]


def run_recipe(
    name: str,
    changes: Sequence[str],
    command: str,
    *,
    where: Destination = Destination(),
    plan_only: bool = False,
    detach: bool = False,
    as_json: bool = False,
) -> None:
    """What `run` and `quickstart` do, for the recipe called `name`; `command` is how users ask for it.

    Raises:
        RequestError: when the recipe is wrong, or a stage finds that it is.
        WorkFailedError: when a stage fails.
    """
    from perilune.cli.plan import derive, print_plan
    from perilune.recipe.load import load_recipe

    path = find_recipe(name)
    recipe = load_recipe(path, changes)
    derived = derive(recipe, where.template)
    if plan_only and as_json:
        template = where.template and where.template.model_dump(mode="json")
        print_json({"recipe": recipe.model_dump(mode="json"), "template": template, "stages": derived})
        return
    print_plan(recipe, derived, sys.stdout if plan_only else sys.stderr)
    if plan_only:
        return
    if detach:
        _detach(recipe, path, changes, command, where, as_json=as_json)
    else:
        _follow(recipe, _with_changes(command, changes), where, as_json=as_json)


def find_recipe(name: str) -> Path:
    """The file called `name`, or else the bundled recipe of that name."""
    from perilune.recipe.load import bundled_recipe, bundled_recipes

    path = Path(name)
    return bundled_recipe(name) if not path.exists() and name in bundled_recipes() else path


def _follow(recipe: Recipe, again: str, where: Destination, *, as_json: bool) -> None:
    """Carry the experiment to its end and tell what came of it."""
    from perilune.cli.follow import follow
    from perilune.cli.results import next_steps, print_results, results_document
    from perilune.cli.view import experiment_view
    from perilune.control.experiments import Control, open_experiment
    from perilune.control.lookup import stage_statuses
    from perilune.ui.report import build_report

    began = time.monotonic()
    control = Control()
    experiment = open_experiment(control, recipe)
    failure = follow(control, experiment, recipe, where.template)
    statuses = stage_statuses(control, [experiment])
    problem: Exception | None = failure
    report: Path | None = None
    try:
        view = experiment_view(control, experiment, statuses)
        report = build_report(view, control.home.experiment(experiment) / "report.html")
    except Exception as error:  # what was found is told before this is
        problem = problem or error
    seconds = time.monotonic() - began
    document = results_document(recipe, experiment, statuses, seconds=seconds, report=report)
    if as_json:
        typer.echo(json.dumps(document))  # on one line
    elif failure is None:
        print_results(document)
        echo(next_steps(document, again))
    if problem is not None:
        raise problem


def _detach(
    recipe: Recipe, path: Path, changes: Sequence[str], command: str, where: Destination, *, as_json: bool
) -> None:
    """Start a process of its own session that follows the experiment, and say how to watch it."""
    from perilune.control.experiments import Control, open_experiment

    control: Control = Control()
    experiment = open_experiment(control, recipe)
    log = control.home.experiment(experiment) / "driver.log"
    driver_command = [sys.executable, "-m", "perilune.cli.main", "run", str(path.absolute())]
    driver_command += where.options
    driver_command += [argument for change in changes for argument in ("--set", change)]
    with log.open("ab") as out:
        driver = subprocess.Popen(
            driver_command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    if as_json:
        print_json({"experiment": experiment, "pid": driver.pid, "log": str(log)})
        return
    echo(f"experiment {experiment} goes on in the background, process {driver.pid}")
    echo(f"  watch it     {_with_changes(command, changes)}")
    echo("  its runs     perilune runs")
    echo(f"  its log      {log}")


def _with_changes(command: str, changes: Sequence[str]) -> str:
    """The command with its overrides, as it would be typed; a seed is left to whoever repeats it."""
    return shlex.join([*shlex.split(command), *(part for change in changes for part in ("--set", change))])
