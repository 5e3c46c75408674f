"""What a recipe will do, derived before any work starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from perilune.bundle.machine import require_memory
from perilune.bundle.plugin import MemoryNeed, load_plugin
from perilune.cli.console import duration
from perilune.cli.curve import size
from perilune.errors import RequestError
from perilune.recipe.schema import job_for
from perilune.terminal import printable

if TYPE_CHECKING:
    from perilune.control.queries.forecast import CostForecast, Forecast, StageForecast
    from perilune.control.runs.templates import Template
    from perilune.recipe.schema import Recipe


def derive(recipe: Recipe, template: Template | None = None) -> list[dict[str, Any]]:
    """What each stage's plugin derives from its job where it is to run, in the order in which stages run.

    Raises:
        RequestError: when a stage cannot work, naming the stage.
    """
    stages = []
    for stage in recipe.stages:
        try:
            job = job_for(recipe, stage)
            job = job if template is None else template.job(job)
            figures = dict(load_plugin(stage.task).plan(job))
            for need in figures.values():
                if template is None and isinstance(need, MemoryNeed):
                    require_memory(need, job.resources)
        except RequestError as error:
            where = f"stages.{stage.name}" + (f": {error.where}" if error.where else "")
            raise RequestError(error.what, where=where, remedy=error.remedy) from None
        if job.resources.processes > 1:
            figures["processes"] = f"{job.resources.processes}, each of which takes that memory"
        stages.append(
            {
                "name": stage.name,
                "task": stage.task,
                "consumes": stage.consumes,
                "derived": {name: str(value) for name, value in figures.items()},
            }
        )
    return stages


def print_plan(recipe: Recipe, stages: Sequence[dict[str, Any]], out: TextIO) -> None:
    """Print what was derived, a block a stage."""
    lines = [f"{recipe.name}, seed {recipe.seed}"]
    if recipe.model is not None:
        environment = "/".join(
            str(recipe.environment[key]) for key in ("id", "task") if key in recipe.environment
        )
        lines = [f"{lines[0]}: model {recipe.model.preset or recipe.model.path}, environment {environment}"]
    labels = [name for stage in stages for name in stage["derived"]]
    width = max((len(label) for label in labels), default=0)
    for stage in stages:
        taken = ", ".join(f"{field} from {source}" for field, source in stage["consumes"].items())
        lines.append(f"  {stage['name']}: {stage['task']}" + (f" ({taken})" if taken else ""))
        lines += [f"      {name:<{width}}  {value}" for name, value in stage["derived"].items()]
    out.write(printable("\n".join(lines)) + "\n")
    out.flush()


def print_forecast(forecast: Forecast, out: TextIO) -> None:
    """Print what carrying out the stages would do, a line a fact."""
    facts = [("where", f"{forecast.placement}, launcher {forecast.launcher}")]
    if forecast.workspace:
        facts.append(("where", f"files go below {forecast.workspace}"))
    if forecast.turn:
        facts.append(("turn", f"{forecast.turn}: {'begins at once' if forecast.has_turn else 'has to wait'}"))
    facts += [("stages", line) for stage in forecast.stages for line in _stage(stage)]
    facts += [("cost", line) for line in (_cost(forecast.cost) if forecast.cost else ())]
    facts += [("secrets", _secret(name, problem)) for name, problem in forecast.secrets.items()]
    facts.append(("retries", _retries(forecast.retry)))
    facts += [("limits", line) for line in _limits(forecast.limits)]
    shown = ""
    for label, fact in facts:
        out.write(printable(f"  {label if label != shown else '':<9}{fact}") + "\n")
        shown = label
    out.flush()


def _stage(stage: StageForecast) -> list[str]:
    match stage.action:
        case "reuse":
            return [f"{stage.name} was finished before: run {stage.run_id} is reused"]
        case "join":
            return [f"{stage.name} is under way: run {stage.run_id} is joined"]
        case "later":
            return [f"{stage.name} begins after {' and '.join(stage.after)}"]
    parts = ", ".join(f"{name} {size(count)}" for name, count in stage.files.items())
    machines = f" to each of {stage.nodes} machines" if stage.nodes > 1 else ""
    return [f"{stage.name} begins; to copy{machines}: {size(stage.bytes)}", f"  {parts}"]


def _cost(cost: CostForecast) -> list[str]:
    if not cost.per_hour:
        return [f"cannot be told now: {cost.problem}"]
    lines = [
        f"{cost.per_hour:.4g} an hour a machine",
        f"a machine is given back after {duration(cost.seconds)} at the latest, at {cost.attempt:.4g}",
        f"all stages: {cost.stages:.4g} at most; with every retry {cost.retried:.4g}, preemptions apart",
        f"today's cap of {cost.daily_cap:.4g} has {cost.left:.4g} left",
    ]
    return [*lines, *([cost.problem] if cost.problem else [])]


def _secret(name: str, problem: str) -> str:
    return f"{name}: {problem}; perilune secrets set {name}" if problem else f"{name} is set"


def _retries(retry: Mapping[str, Any]) -> str:
    kinds = (("infrastructure", "its machine"), ("lost", "silence"), ("user", "the task itself"))
    times = ", ".join(f"{retry[kind]} by {whose}" for kind, whose in kinds)
    return f"of failures {times}; of preemptions all"


def _limits(limits: Mapping[str, Any]) -> list[str]:
    said = {
        "max_lifetime": "an attempt is stopped after",
        "on_box_stop_after": "it stops itself when not looked at for",
        "lost_after": "it is given up when out of sight for",
    }
    return [f"{what} {duration(limits[key])}" for key, what in said.items() if limits.get(key) is not None]
