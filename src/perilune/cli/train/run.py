"""`perilune run`: print what a recipe will do, run or resume it, and print the results."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.arguments import Json, RecipeArgument, SetOption
from perilune.cli.output import echo, print_json, say_if_slow
from perilune.control.record.home import Home, has_daemon
from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.control.queries.forecast import Forecast
    from perilune.control.queries.lookup import StageStatus
    from perilune.control.runs.experiments import Control
    from perilune.control.runs.progress import StageStarted
    from perilune.control.runs.templates import Template
    from perilune.plan.estimate import Estimate, TrialCache
    from perilune.recipe.schema import Recipe

SLOW_CHECK = "still checking the recipe and the tasks of its environment; Ctrl-C stops"
TERMINATION_WAIT_S = 15.0  # seconds to wait for proof that rented machines are gone

SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of the recipe. Short for --set seed=N.")]
WithOption = Annotated[
    list[str] | None,
    typer.Option(
        "--with", metavar="KEY=VALUE", help="Set a key that the template's allowed_overrides lists."
    ),
]


def run(
    recipe: RecipeArgument,
    *,
    set_: SetOption = None,
    seed: SeedOption = None,
    template: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Template that says where runs execute; see `perilune templates list`."
        ),
    ] = None,
    with_: WithOption = None,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Print what the command would do, where and at what cost, and exit."),
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once the first stage is accepted.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a recipe, or resume one that was run before.

    Stages that finished before are reused, and running stages are joined. Ctrl-C stops the stage that this
    command started. To resume that stage from its last checkpoint, or after the command was killed, run the
    same command again. With --detach, the daemon starts the later stages, or a background process if no
    daemon runs.

    \b
    perilune run quickstart
    perilune run mine.yaml --set rl.steps=50 --seed 1
    perilune run mine.yaml --template gpu1 --plan
    perilune run mine.yaml --template gpu1 --detach
    """
    target, options = parse_destination(template, with_ or ())
    command = shlex.join(["perilune", "run", recipe, *options])
    changes = overrides(set_, seed)
    run_recipe(recipe, changes, command, template=target, plan_only=plan, detach=detach, as_json=as_json)


def parse_destination(name: str | None, changes: Sequence[str]) -> tuple[Template | None, list[str]]:
    """Return the target of runs (None for this machine), and the options that select it."""
    if name is None:
        if changes:
            raise RequestError(
                "--with sets a key of a template, and no template is given", remedy="--template ID"
            )
        return None, []
    from perilune.control.runs.templates import load_template

    options = ["--template", name, *(part for pair in changes for part in ("--with", pair))]
    return load_template(Home.open(), name, changes), options


def overrides(set_: Sequence[str] | None, seed: int | None) -> list[str]:
    """Return the options `--set` and `--seed` as overrides of a recipe, the seed last."""
    return [*(set_ or ()), *([] if seed is None else [f"seed={seed}"])]


def run_recipe(
    name: str,
    changes: Sequence[str],
    command: str,
    *,
    template: Template | None = None,
    plan_only: bool = False,
    detach: bool = False,
    as_json: bool = False,
) -> None:
    """Run the recipe called `name`; `command` is the command line that runs it again.

    Raises:
        RequestError: when the recipe is wrong, or a stage fails because of it.
        WorkFailedError: when a stage fails for another reason.
    """
    from perilune.recipe.load import load_recipe

    with say_if_slow(SLOW_CHECK):
        recipe = load_recipe(name, changes)  # its errors appear at once, so the heavy imports follow
        from perilune.cli.data.audit import print_grades
        from perilune.cli.train.plan import derive_plans, print_estimate, print_forecast, print_plan

        derived = derive_plans(recipe, template, check=plan_only)  # before a home is created
        from perilune.control.queries.forecast import forecast_submission
        from perilune.control.runs.experiments import Control, plan_stages

        control = Control()
        estimated = add_estimates(control, recipe, template, derived)
    if not (plan_only and as_json):
        print_plan(recipe, derived, sys.stdout if plan_only else sys.stderr)
    rerun = _add_overrides(command, changes)
    if plan_only:
        forecast = forecast_submission(control, plan_stages(recipe, template), template)
        if as_json:
            print_json(plan_document(recipe, derived, template, estimated, forecast))
            return
        print_estimate(recipe, estimated, template, sys.stdout)
        print_forecast(forecast, sys.stdout)
        audit = shlex.join(["perilune", "environments", "audit", name])
        print_grades(recipe, _add_overrides(audit, changes))
    elif detach:
        _detach(control, recipe, changes, rerun, template, as_json=as_json)
    else:
        run_stages(control, recipe, template, rerun, changes, estimated=estimated, as_json=as_json)


def add_estimates(
    control: Control, recipe: Recipe, template: Template | None, derived: list[dict[str, Any]]
) -> dict[str, Estimate]:
    """Estimate each stage, and add its expected time to its derived values."""
    estimated = estimate_locally(control, recipe, template, {})
    for stage in derived:
        if stage["name"] in estimated:
            stage["derived"]["expected"] = str(estimated[stage["name"]])
    return estimated


def estimate_locally(
    control: Control, recipe: Recipe, template: Template | None, trial_cache: TrialCache
) -> dict[str, Estimate]:
    """Return the estimate for each stage, if runs go to a process on this machine and it is calibrated.

    Args:
        trial_cache: trials of environments, to share them between recipes.
    """
    from perilune.cli.train.plan import runs_in_local_process
    from perilune.plan.estimate import estimate

    if not runs_in_local_process(template):
        return {}
    return estimate(control, recipe, trial_cache)


def run_stages(
    control: Control,
    recipe: Recipe,
    template: Template | None,
    rerun: str,
    changes: Sequence[str] = (),
    *,
    estimated: Mapping[str, Estimate] = MappingProxyType({}),
    as_json: bool,
) -> None:
    """Run all stages of a recipe and print the results.

    Args:
        rerun: the command line that runs it again.
        changes: the overrides that the recipe was loaded with.
    """
    from perilune.control.runs.experiments import open_experiment
    from perilune.models.native.build import missing_kernels_message, native
    from perilune.plan.estimate import save_estimate

    if template is None and recipe.model is not None and native().library is None:
        sys.stderr.write(f"{missing_kernels_message(native().reason)}\n")
    experiment = open_experiment(control, recipe, changes)
    save_estimate(control.home.experiment(experiment), estimated)
    run_experiment(control, experiment, recipe, template, rerun, as_json=as_json)


def plan_document(
    recipe: Recipe,
    derived: list[dict[str, Any]],
    template: Template | None,
    estimated: Mapping[str, Estimate],
    ahead: Forecast,
) -> dict[str, Any]:
    from perilune.cli.data.audit import load_grades
    from perilune.cli.train.plan import describe_time, describe_tokenizer
    from perilune.control.queries.lookup import rename_run_id
    from perilune.plan.estimate import estimate_document

    placed = None if template is None else template.model_dump(mode="json")
    document: dict[str, Any] = {
        "recipe": recipe.model_dump(mode="json"),
        "template": placed,
        "stages": derived,
    }
    document["estimate"] = estimate_document(estimated)
    document["forecast"] = asdict(ahead, dict_factory=rename_run_id)
    document["time"] = describe_time(recipe, estimated, template) if recipe.model is not None else None
    return document | {"tokenizer": describe_tokenizer(recipe), "reward_audits": load_grades(recipe)}


def run_experiment(
    control: Control,
    experiment: str,
    recipe: Recipe,
    template: Template | None,
    rerun: str,
    *,
    asked: bool = True,
    as_json: bool = False,
) -> None:
    """Run an experiment to its end, write its report and print its results.

    Args:
        rerun: the command line that runs it again.
        asked: as in `perilune.control.runs.experiments.advance`.
    """
    from perilune.cli.train.follow import follow
    from perilune.cli.train.results import next_steps, print_results, results_document
    from perilune.control.queries.lookup import stage_statuses
    from perilune.plan.estimate import load_estimate
    from perilune.ui.experiment import view_experiment
    from perilune.ui.report import build_report

    began = time.monotonic()
    failure = follow(control, experiment, recipe, template, asked=asked)
    statuses = stage_statuses(control, [experiment])
    problem: Exception | None = failure
    report: Path | None = None
    try:
        view = view_experiment(control, experiment, statuses)
        report = build_report(view, control.home.experiment(experiment) / "report.html")
    except Exception as error:  # raised after the results are printed
        problem = problem or error
    seconds = time.monotonic() - began
    _wait_for_termination(control)
    estimated = load_estimate(control.home.experiment(experiment))
    document = results_document(
        recipe, experiment, statuses, seconds=seconds, report=report, estimated=estimated
    ) | {"cost": _compute_cost(control, statuses, template)}
    if as_json:
        print_json(document, indent=None)
    elif failure is None:
        print_results(document)
        echo(next_steps(document, rerun))
    if problem is not None:
        raise problem


def _compute_cost(
    control: Control, statuses: Sequence[StageStatus], template: Template | None
) -> float | None:
    from perilune.control.machines.budget import cost_of_runs
    from perilune.control.machines.leases import compute_cost

    with control.store.snapshot() as session:
        rented = cost_of_runs(session, [status.run_id for status in statuses])
    if rented is not None or template is None or template.price is None:
        return rented
    return compute_cost(template.price, sum(status.seconds or 0.0 for status in statuses))


def _wait_for_termination(control: Control) -> None:
    from perilune.cli.machines.rented import warn_about_machines

    until = time.monotonic() + TERMINATION_WAIT_S
    while control.reconciler.rentals.reconcile_managed():
        if time.monotonic() > until:
            warn_about_machines(control)
            return
        time.sleep(0.5)


def _detach(
    control: Control,
    recipe: Recipe,
    changes: Sequence[str],
    command: str,
    template: Template | None,
    *,
    as_json: bool,
) -> None:
    document, first = start_detached(control, recipe, changes, template)
    if as_json:
        print_json(document)
    elif first is None:
        echo(f"every stage of {recipe.name} finished before; to see the results: {command}")
    else:
        experiment = document["experiment_id"]
        driver = f"process {document['pid']}" if "pid" in document else "the daemon"
        echo(f"experiment {experiment}: continued by {driver}")
        # A bundle that is already running is joined, wherever it runs.
        state = "was running already, and stays where it is" if first.attached else "is accepted"
        echo(f"stage {first.stage}, {first.position} of {first.stages}, {state}: run {first.run_id}")
        for purpose, line in (
            ("follow it", command),
            ("wait for its end", f"perilune wait {experiment}"),
            ("list its runs", f"perilune runs {experiment}"),
            ("explain its state", f"perilune explain {first.run_id}"),
            ("stop it", f"perilune cancel {experiment}"),
            *([("read its log", document["log"])] if "log" in document else []),
        ):
            echo(f"  {purpose:<19} {line}")


def start_detached(
    control: Control, recipe: Recipe, changes: Sequence[str], template: Template | None
) -> tuple[dict[str, Any], StageStarted | None]:
    """Submit the first stage that has to run; returns the experiment as JSON, and that stage.

    The daemon of the home continues the experiment. Without a daemon, or if trackers must be fed meanwhile, a
    background process does.
    """
    from perilune.control.runs.experiments import advance, open_experiment, plan_stages
    from perilune.control.runs.progress import StageStarted

    experiment = open_experiment(control, recipe, changes)
    events = advance(control, experiment, plan_stages(recipe, template), template=template)
    first = next((event for event in events if isinstance(event, StageStarted)), None)
    document: dict[str, Any] = {"experiment_id": experiment, "name": recipe.name}
    document["daemon"] = has_daemon(control.home)
    if first is not None:
        document |= {"stage": first.stage, "run": first.run_id}
    if first is not None and (recipe.tracking or not document["daemon"]):
        log = control.home.experiment(experiment) / "driver.log"
        command_line = ["perilune.cli.train.detached", experiment]
        document |= {"pid": start_module(command_line, log), "log": str(log)}
    return document, first


def start_module(module: Sequence[str], log: Path) -> int:
    """Run a Python module with its arguments in a session of its own; returns the process id."""
    from perilune.execution.launchers.process import start_detached

    return start_detached([sys.executable, "-m", *module], log).pid


def _add_overrides(command: str, changes: Sequence[str]) -> str:
    return shlex.join([*shlex.split(command), *(part for change in changes for part in ("--set", change))])
