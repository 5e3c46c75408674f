"""`perilune sweep`: run a recipe with several settings and seeds, and compare the results."""

from __future__ import annotations

import shlex
import time
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.bundle.machine import usable_threads
from perilune.cli.arguments import Json, RecipeArgument
from perilune.cli.console import make_stage_progress
from perilune.cli.inspect.compare import comparison_document, print_comparison, unbiased_command
from perilune.cli.inspect.run_table import describe_result
from perilune.cli.output import echo, print_json
from perilune.cli.train.run import WithOption, estimate_locally, parse_destination, start_module
from perilune.cli.train.trackers import LAST_SECONDS, Trackers
from perilune.errors import RequestError, WorkFailedError
from perilune.plural import plural
from perilune.units import format_duration

if TYPE_CHECKING:
    from perilune.control.queries.sweep_forecast import ArmForecast
    from perilune.control.runs.experiments import Control
    from perilune.control.runs.sweeps import ArmState, Sweep
    from perilune.control.runs.templates import Template
    from perilune.plan.estimate import TrialCache
    from perilune.recipe.axes import Axis, Settings
    from perilune.recipe.schema import Recipe

POLL_SECONDS = 1.0
MAX_LISTED_ARMS = 100  # arms that --plan lists


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """The request for a sweep.

    Attributes:
        search: number of arms that Optuna proposes; None if all arms are known from the start.
        template: where runs go.
        tracking: trackers that get the metrics of all runs.
        command: the command line that starts and continues the sweep.
    """

    recipe: str
    axes: tuple[Axis, ...]
    seeds: tuple[int, ...]
    search: int | None
    metric: str | None
    template: Template
    tracking: tuple[str, ...]
    command: tuple[str, ...]

    def load(self, settings: Settings, seed: int) -> Recipe:
        from perilune.recipe.load import load_recipe

        return load_recipe(self.recipe, make_overrides(settings, seed))


def make_overrides(settings: Settings, seed: int) -> list[str]:
    """Return the settings of an arm with a seed, as overrides of the recipe."""
    return [*settings, f"seed={seed}"]


def sweep(
    recipe: RecipeArgument,
    *,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUES",
            help="Values of a key (rl.lr=1e-5,3e-5), or a range (rl.lr=1e-6..1e-4). Repeatable.",
        ),
    ] = None,
    seeds: Annotated[
        str,
        typer.Option(
            metavar="N|LIST", help="Seeds of each arm: their number (3), a range (3..5), or a list (0,4,7)."
        ),
    ] = "1",
    random: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Draw N random arms instead of running the whole grid."),
    ] = None,
    search: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Let Optuna propose N arms, one after the other.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE.METRIC", help="Metric to compare. Default: pass@1 of the last evaluation."
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of runs at once on this machine. Default: as many as its cores allow if the "
            "recipe sets device: cpu and threads, else 1.",
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Template that says where runs execute, and how many at once.",
        ),
    ] = None,
    with_: WithOption = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the sweep. Default: the name of the recipe and a number.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="List the arms and their expected time and cost, and exit.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Run the sweep in the background.")] = False,
    as_json: Json = False,
) -> None:
    """Run a recipe with several settings and seeds, and compare the results.

    Each arm runs with each seed as an experiment of its own. Stages that arms have in common run once. An arm
    that fails does not stop the other arms. The same command continues a sweep that was interrupted, and
    retries the stages that failed.

    A range needs --random or --search. Its values are drawn on a logarithmic scale if the range starts above
    0 and one of its bounds has a decimal point or an exponent, such as 1e-6. Otherwise they are uniform.

    \b
    perilune sweep words.yaml --set rl.lr=1e-5,3e-5,1e-4 --seeds 3
    perilune sweep words.yaml --set rl.lr=1e-6..1e-4 --set rl.samples=4,8 --random 12 --plan
    perilune sweep words.yaml --set rl.lr=1e-6..1e-4 --search 20 --metric after_rl.pass@1
    """
    from perilune.cli.train.plan import derive_plans
    from perilune.control.queries.comparison import check_metric, describe_unseen_metric
    from perilune.control.runs.experiments import Control
    from perilune.control.runs.sweeps import check_sweep_name, open_sweep
    from perilune.recipe.axes import parse_axes, parse_seeds
    from perilune.recipe.load import load_recipe

    axes = parse_axes(set_ or ())
    arms = _initial_arms(axes, random, search)
    first = load_recipe(recipe, arms[0])
    if metric is not None:
        check_metric(metric, (stage.name for stage in first.stages))
    if name is not None:
        check_sweep_name(name)
    target, selection = parse_destination(template, with_ or ())
    options = {"set": set_, "seeds": seeds, "random": random, "search": search, "metric": metric}
    request = SweepRequest(
        recipe,
        axes,
        parse_seeds(seeds, first.seed),
        search,
        metric,
        template=_choose_template(target, slots, first),
        tracking=first.tracking,
        command=(*_sweep_command(recipe, options | {"slots": slots, "name": name}), *selection),
    )
    recipes = {(settings, seed): request.load(settings, seed) for settings in arms for seed in request.seeds}
    for settings in arms:  # refuses what cannot work before anything runs
        derive_plans(recipes[settings, request.seeds[0]], target)
    control = Control()
    if metric is not None and (doubt := describe_unseen_metric(control, first.name, metric)):
        echo(f"warning: {doubt}", err=True)
    if plan:
        _print_plan(control, request, recipes, as_json=as_json)
        return
    definition = {"recipe": first.model_dump(mode="json"), **options, "seeds": request.seeds}
    fields = {"recipe": recipe, "command": shlex.join(request.command), "metric": metric}
    opened = open_sweep(control, definition, fields, name=name, stem=first.name)
    if detach:
        _detach(control, opened, request.command, as_json=as_json)
    else:
        _SweepRun(control, request, opened).run(recipes, as_json=as_json)


def _initial_arms(axes: Sequence[Axis], random: int | None, search: int | None) -> list[Settings]:
    """Return the arms that are known before anything has run: all of them, except in a search."""
    from perilune.control.runs.search import propose_arm
    from perilune.recipe.axes import grid_arms, sample_arms

    if random is not None and search is not None:
        raise RequestError("--random and --search exclude each other")
    if search is not None:
        return [arm for arm in [propose_arm(axes, (), {}, maximize=True)] if arm is not None]
    return grid_arms(axes) if random is None else sample_arms(axes, random)


def _choose_template(given: Template | None, slots: int | None, recipe: Recipe) -> Template:
    """Return the given template, or this machine with as many slots as its cores allow."""
    from perilune.control.runs.templates import Template

    if given is not None:
        if slots is not None:
            raise RequestError(
                "--slots applies to this machine only", remedy="set the key `slots` of the template"
            )
        return given
    threads = recipe.resources.threads * recipe.resources.processes
    room = usable_threads() // threads if threads and recipe.resources.device == "cpu" else 1
    return Template(description="this machine", slots=slots or max(1, room))


def _sweep_command(recipe: str, options: dict[str, Any]) -> list[str]:
    words = ["perilune", "sweep", recipe]
    for option, value in options.items():
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                words += [f"--{option}", str(item)]
    return words


def _print_plan(
    control: Control,
    request: SweepRequest,
    recipes: dict[tuple[Settings, int], Recipe],
    *,
    as_json: bool,
) -> None:
    from perilune.control.queries.forecast import forecast_submission
    from perilune.control.queries.sweep_forecast import forecast_sweep
    from perilune.control.runs.experiments import plan_stages

    template = request.template
    expected = [*recipes.values(), *_load_further_arms(request, recipes)]
    forecast = forecast_sweep(control, expected, template)
    runs = sum(forecast.to_run.values())
    first = next(iter(recipes.values()))
    price = forecast_submission(control, plan_stages(first, template), template).cost
    calibrated = _estimate_seconds(control, expected, forecast.arms, template)
    seconds = forecast.seconds if calibrated is None else calibrated
    arms = [
        {"settings": list(settings), "seed": seed, **asdict(arm)}
        for (settings, seed), arm in zip(recipes, forecast.arms, strict=False)
    ]
    document = {
        "recipe": request.recipe,
        "arms": arms,
        "search": request.search,
        "slots": template.slots,
        "to_run": dict(forecast.to_run),
        "seconds": seconds,
        "highest_cost": None if price is None or not price.attempt else price.attempt * runs,
    }
    if as_json:
        print_json(document)
        return
    echo(f"{first.name}: {plural(len(expected), 'experiment')}, {plural(runs, 'run')} of stages to do")
    for (settings, seed), arm in list(zip(recipes, forecast.arms, strict=False))[:MAX_LISTED_ARMS]:
        parts = [
            f"{count} {word}" for count, word in ((arm.shared, "shared"), (arm.done, "finished")) if count
        ]
        more = f" ({', '.join(parts)})" if parts else ""
        echo(f"  {' '.join(make_overrides(settings, seed))}: {plural(arm.stages, 'stage')}{more}")
    if len(arms) > MAX_LISTED_ARMS:
        echo(f"  and {len(arms) - MAX_LISTED_ARMS} more: --plan --json lists all")
    if request.search is not None:
        echo(f"  Optuna proposes {plural(request.search - 1, 'further arm')} from the results")
    at_once = f"{template.slots} at once" if template.slots else "all at once"
    basis = "by this machine's calibration"
    if calibrated is None:
        basis = "if each stage takes as long as it took on average before"
    echo(f"  time  {_format_time(seconds, template, runs, basis)}; {at_once}")
    if price is not None:
        cost = price.problem if not price.attempt else f"{price.attempt * runs:.4g} at most, without retries"
        echo(f"  cost  {cost}")


def _load_further_arms(request: SweepRequest, known: Container[tuple[Settings, int]]) -> list[Recipe]:
    """Load random arms in place of those that Optuna will propose: they have as many stages in common."""
    from perilune.recipe.axes import sample_arms

    arms = sample_arms(request.axes, 10 * (request.search or 0))  # some are equal
    further = [settings for settings in arms if (settings, request.seeds[0]) not in known]
    chosen = further[: (request.search or 1) - 1]
    return [request.load(settings, seed) for settings in chosen for seed in request.seeds]


def _estimate_seconds(
    control: Control, recipes: Sequence[Recipe], arms: Sequence[ArmForecast], template: Template
) -> float | None:
    """Sum the estimated times of all stages to run; None if one cannot be estimated."""
    trial_cache: TrialCache = {}
    seconds = 0.0
    for recipe, arm in zip(recipes, arms, strict=True):
        estimates = estimate_locally(control, recipe, template, trial_cache) if arm.to_run else {}
        if not estimates.keys() >= set(arm.to_run):
            return None
        seconds += sum(estimates[stage].seconds for stage in arm.to_run)
    return seconds


def _format_time(seconds: float | None, template: Template, runs: int, basis: str) -> str:
    from perilune.cli.train.plan import runs_in_local_process

    if seconds is None and not runs_in_local_process(template):
        return "unknown: not every stage has a finished run, and only times on this machine are estimated"
    if seconds is None:
        return (
            "unknown: no calibration of this device, and no finished run of every stage. Run perilune doctor"
        )
    if seconds == 0:
        return "nothing is left to run"
    return f"about {format_duration(seconds / max(1, template.slots or runs))}, {basis}"


def _detach(control: Control, sweep: Sweep, command: Sequence[str], *, as_json: bool) -> None:
    log = control.home.sweeps / f"{sweep.name}.log"
    pid = start_module(["perilune.cli.main", *command[1:]], log)
    document = {"sweep": sweep.name, "pid": pid, "log": str(log)}
    if as_json:
        print_json(document)
        return
    echo(f"sweep {sweep.name}: continued by process {pid}")
    for purpose, line in (
        ("follow it", shlex.join(command)),
        ("compare its arms", f"perilune compare {sweep.name}"),
        ("read its log", str(log)),
    ):
        echo(f"  {purpose:<19} {line}")


class _SweepRun:
    def __init__(self, control: Control, request: SweepRequest, found: Sweep) -> None:
        from perilune.control.runs.sweeps import SweepRunner

        self.control, self.request, self.sweep = control, request, found
        self.runner = SweepRunner(control, request.template)
        self.trackers = Trackers(control, request.tracking)
        self.tracked: set[str] = set()  # ids of runs
        self.view = make_stage_progress()
        self.labels: dict[str, str] = {}  # label, by experiment
        self.begun: set[str] = set()  # experiments with a started stage
        self.failed: dict[str, str] = {}  # problem, by experiment

    def run(self, recipes: dict[tuple[Settings, int], Recipe], *, as_json: bool) -> None:
        """Run all arms to their ends, compare them, and print the comparison.

        Raises:
            WorkFailedError: an experiment failed; the others have ended too.
            KeyboardInterrupt: after Ctrl-C, once the runs have stopped.
        """
        began = time.monotonic()
        recorded = {arm.settings: arm.experiments for arm in self.sweep.arms}
        arms = [*dict.fromkeys([*recorded, *(settings for settings, _ in recipes)])]
        with self.view:
            try:
                for settings in arms:
                    self._submit(settings, recipes)
                self.view.print(f"{plural(len(self.labels), 'experiment')} submitted")
                self._follow()
                for warning in self.trackers.warnings(LAST_SECONDS):
                    self.view.print(warning)
            except KeyboardInterrupt:
                self._stop()
                raise
        self._print_comparison(time.monotonic() - began, as_json=as_json)
        if self.failed:
            raise WorkFailedError(
                f"{len(self.failed)} of {plural(len(self.labels), 'experiment')} failed",
                where=f"sweep {self.sweep.name}",
                remedy="perilune explain EXPERIMENT says why; the same command retries them",
            )

    def _stop(self) -> None:
        """Stop all runs of the sweep; a second Ctrl-C leaves them to the next command."""
        from perilune.cli.train.follow import interrupts_ignored

        with interrupts_ignored():  # until the requests are recorded
            stopping = self.runner.request_cancel()
        try:
            self.view.print("stopping the sweep; press Ctrl-C again to exit now")
            self.runner.cancel(stopping)
            self.view.print("stopped; the same command continues the sweep")
        except KeyboardInterrupt:
            self.view.print("its runs are still stopping; `perilune reconcile` completes it")
            raise

    def _submit(self, settings: Settings, recipes: dict[tuple[Settings, int], Recipe]) -> None:
        """Submit an arm with all its seeds, and record it first."""
        from perilune.control.runs.experiments import open_experiment
        from perilune.control.runs.sweeps import Arm

        loaded = {
            seed: recipes.get((settings, seed)) or self.request.load(settings, seed)
            for seed in self.request.seeds
        }
        experiments = {
            seed: open_experiment(self.control, recipe, make_overrides(settings, seed))
            for seed, recipe in loaded.items()
        }
        arms = {arm.settings: arm for arm in self.sweep.arms}
        arms[settings] = Arm(settings=settings, experiments=experiments)
        self.sweep = self.sweep.with_arms(self.control, list(arms.values()))
        for seed, recipe in loaded.items():
            self.labels[experiments[seed]] = " ".join(make_overrides(settings, seed))
            self.runner.submit(experiments[seed], recipe)

    def _follow(self) -> None:
        """Show progress until all experiments have ended, and let a search propose further arms."""
        while True:
            for experiment, state in self.runner.reconcile().items():
                self._show_arm(experiment, state)
            while self._can_start_arm() and (settings := self._propose_arm()) is not None:
                self._submit(settings, {})
            if not self.runner.live:
                return
            time.sleep(POLL_SECONDS)

    def _show_arm(self, experiment: str, state: ArmState) -> None:
        from perilune.control.runs.experiments import read_progress

        label, stage = self.labels[experiment], state.stage
        if experiment not in self.begun and any(status.attempt_dir is not None for status in state.stages):
            self.begun.add(experiment)
            self.view.start(label, "")
        for status in state.stages:
            if status.attempt_dir is not None and status.run_id not in self.tracked:
                self.tracked.add(status.run_id)
                self.trackers.begin(status.name, status.run_id, ended=status.seconds is not None)
        if state.is_over:
            done = len(self.labels) - len(self.runner.live)
            note = state.problem or describe_result(stage)
            if state.problem:
                self.failed[experiment] = state.problem
            mark = "failed" if state.problem else "done"
            self.view.end(label, mark, f"{note}; {done} of {len(self.labels)} ended".lstrip("; "))
        elif stage.state == "active" and stage.attempt_dir and (progress := read_progress(stage.attempt_dir)):
            unit = f"{progress['unit']} of {stage.name}"
            self.view.update(label, int(progress["done"]), int(progress["total"]), unit, progress["figures"])

    def _can_start_arm(self) -> bool:
        """Return whether a search may start another arm now: as many arms run at once as there are slots."""
        if self.request.search is None or len(self.sweep.arms) >= self.request.search:
            return False
        live = [arm for arm in self.sweep.arms if set(arm.experiments.values()) & set(self.runner.live)]
        return len(live) < (self.request.template.slots or 1)

    def _propose_arm(self) -> Settings | None:
        """Propose the next arm of a search from the figures of the finished arms; None if all were tried."""
        from perilune.control.queries.comparison import final_figures, lower_is_better
        from perilune.control.runs.search import propose_arm

        figures = {}
        metric, by_experiment = final_figures(self.control, self.labels, self.request.metric)
        for arm in self.sweep.arms:
            values = [by_experiment[key] for key in arm.experiments.values() if key in by_experiment]
            if values and not set(arm.experiments.values()) & set(self.runner.live):
                figures[arm.settings] = fmean(values)
        arms = [arm.settings for arm in self.sweep.arms]
        return propose_arm(self.request.axes, arms, figures, maximize=not lower_is_better(metric))

    def _print_comparison(self, seconds: float, *, as_json: bool) -> None:
        from perilune.control.queries.comparison import compare_experiments
        from perilune.ui.experiment_comparison import build_comparison

        name = self.sweep.name
        comparison = compare_experiments(self.control, [name])
        page = build_comparison(comparison, self.control.home.sweeps / f"{name}.html")
        if as_json:
            document = {"sweep": name, "failed": self.failed, "page": str(page), "seconds": round(seconds, 3)}
            print_json(document | comparison_document(comparison))
            return
        print_comparison(comparison)
        if follow_up := unbiased_command(self.control, [name], comparison):
            echo(f"  {follow_up}")
        echo(
            f"sweep {name}: {plural(len(self.labels), 'experiment')}, {format_duration(seconds)}; page {page}"
        )
        echo(f"  compare again  perilune compare {name}")
