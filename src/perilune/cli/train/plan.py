"""The plan of a recipe, derived before any work starts, and its printed form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from perilune.bundle.machine import require_device, require_memory
from perilune.bundle.plugin import MemoryNeed, load_plugin
from perilune.cli.output import format_for_terminal
from perilune.environments.core.registry import REWARDS
from perilune.environments.core.rewards import CALL_ERROR_PREFIX
from perilune.errors import RequestError
from perilune.files import canonical_json
from perilune.plan.checks import (
    check_heldout,
    check_job,
    check_optimizer,
    check_texts,
    check_weights,
    distinct_environments,
    find_scoring_failure,
)
from perilune.recipe.schema import MODEL, build_job
from perilune.recipe.tokenizers import find_foreign_character
from perilune.units import format_duration, format_size

if TYPE_CHECKING:
    from perilune.bundle.job import Job
    from perilune.control.queries.forecast import CostForecast, Forecast, StageForecast
    from perilune.control.runs.templates import Template
    from perilune.plan.estimate import Estimate
    from perilune.recipe.schema import Recipe, Stage

ResultT = TypeVar("ResultT")

BRING_LABELS = {
    "metrics": "no checkpoint (bring: metrics)",
    "final": "final checkpoints (bring: final); those to resume from stay on the machine",
    "all": "all checkpoints, also those to resume from (bring: all)",
}


def derive_plans(
    recipe: Recipe, template: Template | None = None, *, check: bool = False
) -> list[dict[str, Any]]:
    """Return the values that the plugin of each stage derives from its job, for the target machine.

    Args:
        check: also do the checks that take seconds (`plan_checks`).

    Raises:
        RequestError: when a stage cannot work, naming the stage. `others` has the errors of other stages.
    """
    _try_reward_functions(recipe)
    stages = _apply_to_stages(recipe, lambda stage: _derive_stage(recipe, stage, template))
    if check:  # after the checks that each run does, so that both commands report the same error first
        check_texts(recipe)
        warnings = _apply_to_stages(recipe, lambda stage: check_job(_place_job(recipe, stage, template)))
        for stage, texts in zip(stages, warnings, strict=True):
            stage["derived"] |= {f"warning {index}": text for index, text in enumerate(texts, 1)}
    return stages


def _apply_to_stages(recipe: Recipe, function: Callable[[Stage], ResultT]) -> list[ResultT]:
    """Return the result of `function` for each stage, or raise the errors of all stages as one."""
    results: list[ResultT] = []
    errors: dict[str, RequestError] = {}  # stages often share a fault, which is reported once
    for stage in recipe.stages:
        try:
            results.append(function(stage))
        except RequestError as error:
            inside = error.where.removeprefix(f"stages.{stage.name}.")
            where = f"stages.{stage.name}" + (f": {inside}" if inside else "")
            errors.setdefault(error.what, RequestError(error.what, where=where, remedy=error.remedy))
    if errors:
        first, *first.others = errors.values()
        raise first
    return results


def _place_job(recipe: Recipe, stage: Stage, template: Template | None) -> Job:
    """Return the job of a stage, with the resources that the template sets."""
    job = build_job(recipe, stage)
    return job if template is None else template.apply_resources(job)


def _derive_stage(recipe: Recipe, stage: Stage, template: Template | None) -> dict[str, Any]:
    job = _place_job(recipe, stage, template)
    if template is None:
        require_device(job.resources)
    figures = dict(load_plugin(stage.task).plan(job))
    check_optimizer(recipe, stage)
    check_heldout(job)
    needs = [need for need in figures.values() if isinstance(need, MemoryNeed)]
    for need in needs if template is None else ():
        require_memory(need, job.resources)
    if needs and MODEL in stage.consumes.values() and (path := job.model.get("path")):
        check_weights(path)
    if job.resources.processes > 1:
        figures["processes"] = f"{job.resources.processes}, each with that memory"
    return {
        "name": stage.name,
        "task": stage.task,
        "consumes": stage.consumes,
        "derived": {name: str(value) for name, value in figures.items()},
    }


def _try_reward_functions(recipe: Recipe) -> None:
    """Load the recipe's reward functions as a run does, in a confined process, and score one answer."""
    for section in distinct_environments(recipe):
        if any(isinstance(term, Mapping) for term in section.get(REWARDS, {}).values()):
            reason = find_scoring_failure(canonical_json(section), recipe.seed, "0")
            if reason.startswith(CALL_ERROR_PREFIX):
                raise RequestError(
                    reason,
                    where=REWARDS,
                    remedy="a function takes prompts, completions, and columns of the tasks, or **columns",
                )


def print_plan(recipe: Recipe, stages: Sequence[dict[str, Any]], out: TextIO) -> None:
    lines = [f"{recipe.name}, seed {recipe.seed}"]
    if recipe.model is not None:
        environment = "/".join(
            str(recipe.environment[key]) for key in ("id", "task") if key in recipe.environment
        )
        suffix = f", environment {environment}" if environment else ""
        lines = [f"{lines[0]}: model {recipe.model.preset or recipe.model.path}{suffix}"]
        if tokenizer := describe_tokenizer(recipe):
            lines.append(f"  tokenizer: {tokenizer}")
    labels = [name for stage in stages for name in stage["derived"]]
    width = max((len(label) for label in labels), default=0)
    for stage in stages:
        inputs = ", ".join(f"{field} from {source}" for field, source in stage["consumes"].items())
        lines.append(f"  {stage['name']}: {stage['task']}" + (f" ({inputs})" if inputs else ""))
        lines += [f"      {name:<{width}}  {value}" for name, value in stage["derived"].items()]
    out.write(format_for_terminal("\n".join(lines)) + "\n")
    out.flush()


def describe_tokenizer(recipe: Recipe) -> str | None:
    """Return the tokenizer of a new model, and why it was chosen; None without a new model."""
    model = recipe.model
    if model is None or model.preset is None:
        return None
    match model.tokenizer:
        case "bpe":
            limit = f"at most {model.vocab_size:,} tokens"
            return f"bpe, {limit}, trained on the data of the stage that makes the model"
        case "bytes":
            return f"bytes; {find_foreign_character(recipe) or 'set in the recipe'}"
    return "one token per character, because the texts that were checked are printable ASCII"


def runs_in_local_process(template: Template | None) -> bool:
    """Return whether runs are processes on this machine, outside of containers."""
    return template is None or (template.placement.name == "local" and template.container is None)


def describe_time(recipe: Recipe, estimated: Mapping[str, Estimate], template: Template | None) -> str:
    """Return the time and memory of all stages together, or the reason why they are unknown."""
    from perilune.plan.estimate import sum_estimates

    if not runs_in_local_process(template):
        return "unknown: only times on this machine are estimated. `perilune simulate` predicts others"
    if not estimated:
        return "unknown: no calibration of this device. Run `perilune doctor`"
    missing = [stage.name for stage in recipe.stages if stage.name not in estimated]
    return str(sum_estimates(estimated)) + (f"; not estimated: {', '.join(missing)}" if missing else "")


def print_estimate(
    recipe: Recipe, estimated: Mapping[str, Estimate], template: Template | None, out: TextIO
) -> None:
    """Print the time, memory and cost of all stages together, or the reason why they are unknown."""
    from perilune.control.machines.leases import compute_cost
    from perilune.plan.estimate import sum_estimates

    if recipe.model is None:
        return
    fact = describe_time(recipe, estimated, template)
    out.write(format_for_terminal(f"  {'time':<9}{fact}") + "\n")
    if estimated and template is not None and template.price is not None:
        total = sum_estimates(estimated)
        low, middle, high = (
            compute_cost(template.price, seconds) for seconds in (total.low, total.seconds, total.high)
        )
        range_ = f"at most {high:.4g}" if total.at_most else f"about {middle:.4g} ({low:.4g} to {high:.4g})"
        out.write(f"  {'cost':<9}{range_}, at {template.price:.4g} per hour\n")


def print_forecast(forecast: Forecast, out: TextIO) -> None:
    """Print the forecast, one fact on each line."""
    facts = [("where", f"{forecast.placement}, launcher {forecast.launcher}")]
    if forecast.workspace:
        facts.append(("where", f"files go below {forecast.workspace}"))
    if forecast.turn:
        facts.append(
            ("queue", f"{forecast.turn}: {'starts at once' if forecast.has_turn else 'has to wait'}")
        )
    facts += [("stages", line) for stage in forecast.stages for line in _stage(stage)]
    facts += [("cost", line) for line in (_cost(forecast.cost) if forecast.cost else ())]
    facts += [
        ("secrets", f"{name}: {problem}; perilune secrets set {name}" if problem else f"{name} is set")
        for name, problem in forecast.secrets.items()
    ]
    facts.append(("retries", _retries(forecast.retry)))
    facts += [("limits", line) for line in _limits(forecast.limits)]
    facts += [("brings", BRING_LABELS[forecast.bring])] if forecast.bring else []
    previous = ""
    for label, fact in facts:
        out.write(format_for_terminal(f"  {label if label != previous else '':<9}{fact}") + "\n")
        previous = label
    out.flush()


def _stage(stage: StageForecast) -> list[str]:
    match stage.action:
        case "reuse":
            return [f"{stage.name} finished before: run {stage.run_id} is reused"]
        case "join":
            return [f"{stage.name} is running: run {stage.run_id} is joined"]
        case "later":
            return [f"{stage.name} starts after {' and '.join(stage.after)}"]
    parts = ", ".join(f"{name} {format_size(count)}" for name, count in stage.files.items())
    machines = f" to each of {stage.nodes} machines" if stage.nodes > 1 else ""
    lines = [f"{stage.name} starts now; to copy{machines}: {format_size(stage.bytes)}", f"  {parts}"]
    if stage.other_code:
        lines.append(f"  run {stage.other_code} has the same settings, but the code has changed since")
    return lines


def _cost(cost: CostForecast) -> list[str]:
    if not cost.per_hour:
        return [f"unknown: {cost.problem}"]
    lines = [
        f"{cost.per_hour:.4g} per machine and hour",
        f"a machine is released after {format_duration(cost.seconds)} at the latest,"
        f" which costs {cost.attempt:.4g}",
        f"all stages: {cost.stages:.4g} at most; {cost.retried:.4g} with every retry, not counting"
        " preemptions",
        f"{cost.left:.4g} of the daily cap of {cost.daily_cap:.4g} is left",
    ]
    return [*lines, *([cost.problem] if cost.problem else [])]


def _retries(retry: Mapping[str, Any]) -> str:
    return (
        f"{retry['infrastructure']} for machine failures, {retry['lost']} for lost workers,"
        f" {retry['user']} for task failures; no limit for preemptions"
    )


def _limits(limits: Mapping[str, Any]) -> list[str]:
    lines = {
        "max_lifetime": "an attempt is stopped after",
        "on_box_stop_after": "it stops itself when out of contact for",
        "lost_after": "it counts as lost if unreachable for",
    }
    return [
        f"{line} {format_duration(limits[key])}" for key, line in lines.items() if limits.get(key) is not None
    ]
