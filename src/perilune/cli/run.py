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
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.output import echo, print_json
from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.control.runs.experiments import Control
    from perilune.control.runs.templates import Template
    from perilune.recipe.schema import Recipe

GONE_SECONDS = 15.0  # for which the proof is waited for that rented machines are gone

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
    plan: Annotated[
        bool, typer.Option("--plan", help="Print what would be done, where, at what cost; do nothing.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return as soon as the first stage is accepted.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a recipe. What it finished before is reused; what is under way is joined; the rest is begun.

    Ctrl-C stops the stage that this command began; the same command goes on from its last checkpoint. When it
    is killed, or detached, `perilune daemon` begins later stages.

    \b
    perilune run quickstart
    perilune run mine.yaml --set rl.steps=50 --seed 1
    perilune run mine.yaml --template box --plan
    perilune run mine.yaml --template box --detach
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
    from perilune.control.record.home import Home
    from perilune.control.runs.templates import load_template

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

    recipe = load_recipe(name, changes)
    derived = derive(recipe, where.template)
    if not (plan_only and as_json):
        print_plan(recipe, derived, sys.stdout if plan_only else sys.stderr)
    if plan_only:
        audit = _with_changes(shlex.join(["perilune", "environments", "audit", name]), changes)
        _print_forecast(recipe, derived, where.template, audit, as_json=as_json)
    elif detach:
        _detach(recipe, _with_changes(command, changes), where, as_json=as_json)
    else:
        carry_out(recipe, where.template, _with_changes(command, changes), as_json=as_json)


def carry_out(recipe: Recipe, template: Template | None, again: str, *, as_json: bool) -> None:
    """Run all stages of a recipe and print the results; `again` is the command that asks for it."""
    from perilune.control.runs.experiments import Control, open_experiment
    from perilune.models.native.build import missing_kernels, native

    if template is None and recipe.model is not None and native().library is None:
        sys.stderr.write(f"{missing_kernels(native().reason)}\n")
    control = Control()
    experiment = open_experiment(control, recipe)
    follow_to_the_end(control, experiment, recipe, template, again, as_json=as_json)


def _print_forecast(
    recipe: Recipe, derived: list[dict[str, Any]], template: Template | None, audit: str, *, as_json: bool
) -> None:
    """Say what carrying it out would do: the dry run; `audit` is the command that audits the rewards."""
    from dataclasses import asdict

    from perilune.cli.environment_audit import grades_of, print_grades
    from perilune.cli.plan import print_forecast
    from perilune.control.queries.forecast import forecast
    from perilune.control.runs.experiments import Control, stage_plans

    ahead = forecast(Control(), stage_plans(recipe, template), template)
    if as_json:
        placed = None if template is None else template.model_dump(mode="json")
        document = {"recipe": recipe.model_dump(mode="json"), "template": placed, "stages": derived}
        print_json(document | {"forecast": asdict(ahead), "reward_audits": grades_of(recipe)})
    else:
        print_forecast(ahead, sys.stdout)
        print_grades(recipe, audit)


def follow_to_the_end(
    control: Control,
    experiment: str,
    recipe: Recipe,
    template: Template | None,
    again: str,
    *,
    asked: bool = True,
    as_json: bool = False,
) -> None:
    """Carry an experiment to its end, write its report, and tell what came of it.

    Args:
        again: the command that asks for it.
        asked: as `perilune.control.runs.experiments.advance`.
    """
    from perilune.cli.follow import follow
    from perilune.cli.results import next_steps, print_results, results_document
    from perilune.cli.view import experiment_view
    from perilune.control.queries.lookup import stage_statuses
    from perilune.ui.report import build_report

    began = time.monotonic()
    failure = follow(control, experiment, recipe, template, asked=asked)
    statuses = stage_statuses(control, [experiment])
    problem: Exception | None = failure
    report: Path | None = None
    try:
        view = experiment_view(control, experiment, statuses)
        report = build_report(view, control.home.experiment(experiment) / "report.html")
    except Exception as error:  # what was found is told before this is
        problem = problem or error
    seconds = time.monotonic() - began
    _see_machines_gone(control)
    document = results_document(recipe, experiment, statuses, seconds=seconds, report=report)
    if as_json:
        typer.echo(json.dumps(document))  # on one line
    elif failure is None:
        print_results(document)
        echo(next_steps(document, again))
    if problem is not None:
        raise problem


def _see_machines_gone(control: Control) -> None:
    """Wait a moment for the proof that what was rented is gone, and say what is not proven."""
    from perilune.cli.machines import tell_unproven

    until = time.monotonic() + GONE_SECONDS
    while control.reconciler.rentals.follow():
        if time.monotonic() > until:
            tell_unproven(control)
            return
        time.sleep(0.5)


def _detach(recipe: Recipe, command: str, where: Destination, *, as_json: bool) -> None:
    """Have the first stage that is to run accepted, see that somebody goes on with it, and say how to follow.

    That is the home's daemon. Where there is none, or figures are to be copied to trackers meanwhile, it is a
    process of its own session.
    """
    from perilune.control.record.home import has_daemon
    from perilune.control.runs.experiments import Control, advance, open_experiment, stage_plans
    from perilune.control.runs.progress import StageStarted

    control = Control()
    experiment = open_experiment(control, recipe)
    events = advance(control, experiment, stage_plans(recipe, where.template), template=where.template)
    first = next((event for event in events if isinstance(event, StageStarted)), None)
    told: dict[str, Any] = {"experiment": experiment, "name": recipe.name, "daemon": has_daemon(control.home)}
    if first is not None:
        told |= {"stage": first.stage, "run": first.run_id}
    if first is not None and (recipe.tracking or not told["daemon"]):
        log = control.home.experiment(experiment) / "driver.log"
        told |= {"pid": _background(experiment, log), "log": str(log)}
    if as_json:
        print_json(told)
    elif first is None:
        echo(f"every stage of {recipe.name} was finished before: {command}")
    else:
        who = f"process {told['pid']} goes on with it" if "pid" in told else "the daemon goes on with it"
        echo(f"experiment {experiment}: {who}")
        # What is under way with the same bundle is not begun a second time, wherever it was sent.
        how = "was under way and stays where it is" if first.attached else "is accepted"
        echo(f"stage {first.stage}, {first.position} of {first.stages}, {how}: run {first.run_id}")
        for what, how in (
            ("watch it", command),
            ("wait for its end", f"perilune wait {experiment}"),
            ("its runs", f"perilune runs -e {experiment}"),
            ("why, and what next", f"perilune explain {first.run_id}"),
            ("stop it", f"perilune cancel {experiment}"),
            *([("its log", told["log"])] if "log" in told else []),
        ):
            echo(f"  {what:<19} {how}")


def _background(experiment: str, log: Path) -> int:
    """Start a process of its own session that goes on with the experiment; returns its number."""
    command = [sys.executable, "-m", "perilune.cli.detached", experiment]
    with log.open("ab") as out:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        ).pid


def _with_changes(command: str, changes: Sequence[str]) -> str:
    """The command with its overrides, as it would be typed; a seed is left to whoever repeats it."""
    return shlex.join([*shlex.split(command), *(part for change in changes for part in ("--set", change))])
