"""Estimates of the time and the peak memory of a recipe's stages on this machine, before they run.

The work of a stage (`work`) depends on the lengths of its episodes (`lengths`). The calibration of this
machine and a trial of the environment give the time of each part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from perilune.bundle.machine import usable_threads
from perilune.bundle.plugin import file_fields, load_plugin
from perilune.errors import RequestError
from perilune.files import read_json, write_json
from perilune.plan.calibration import Calibration, Overhead, load_calibration
from perilune.recipe.schema import build_job
from perilune.units import format_duration, format_size

if TYPE_CHECKING:
    from perilune.bundle.job import Job, Resources
    from perilune.control.runs.experiments import Control
    from perilune.models.narrow import Precision
    from perilune.models.text.tokenizer import Tokenizer
    from perilune.plan.lengths import ExpectedLengths
    from perilune.plan.trial import Trial
    from perilune.recipe.schema import Recipe

ESTIMATE_FILE = "estimate.json"  # file in the folder of an experiment
FORWARD_SHARE = 1 / 3  # time of a forward pass, in that of a training step
OVERHEAD_OF = {  # by task: another task, whose measured overhead stands for its own
    **dict.fromkeys(("selfplay", "distill", "flywheel"), "rl"),
    **dict.fromkeys(("preference", "reward_model"), "sft"),
    **dict.fromkeys(("rejection_sampling", "pairs"), "evaluate"),
}


TrialCache = dict[str, "Trial | None"]
"""Trials by environment, model and teacher; None for an environment that cannot be tried here."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate for a stage.

    Attributes:
        seconds: from its submission to its end; `low` and `high` are its range.
        memory: peak bytes of its process; None for a stage without a memory plan.
        basis: source of the expected lengths of its answers, in words.
        at_most: True if `high` is a limit, and nothing else is known.
    """

    seconds: float
    low: float
    high: float
    memory: int | None
    basis: str
    at_most: bool = False

    def __str__(self) -> str:
        middle = f"about {format_duration(self.seconds)}"
        if self.at_most:
            middle = f"at most {format_duration(self.high)}"
        elif self.high > 1.1 * self.low:
            middle += f" ({format_duration(self.low)} to {format_duration(self.high)})"
        memory = "" if self.memory is None else f", {format_size(self.memory)} of memory"
        return f"{middle}{memory}" + (f"; {self.basis}" if self.basis else "")


def device_name(resources: Resources) -> str:
    """Return the device of a recipe, as calibrations name it: "cuda", or a number of threads."""
    if resources.device == "cuda" or (resources.device == "auto" and Path("/dev/nvidia0").exists()):
        return "cuda"
    return str(resources.threads or usable_threads())


def estimate(control: Control, recipe: Recipe, trial_cache: TrialCache) -> dict[str, Estimate]:
    """Return the estimate for each stage whose work can be counted.

    Empty without a calibration of the recipe's device, and without a language model.

    Args:
        trial_cache: trials of environments that were made before; new ones are added.
    """
    calibration = load_calibration(control.home.root, device_name(recipe.resources))
    if calibration is None or recipe.model is None:
        return {}
    from perilune.models.memory import get_model_card
    from perilune.models.text.template_facts import recipe_tokenizer
    from perilune.plan.lengths import estimate_lengths
    from perilune.tasks.stage.memory_plan import section_config

    model = recipe.model.model_dump()
    parameters = get_model_card(section_config(model)).parameters
    tokenizer = recipe_tokenizer(model)
    trials = run_trials(recipe, tokenizer, trial_cache)
    expected = estimate_lengths(control, recipe, trials, tokenizer)
    estimates = {}
    for stage in recipe.stages:
        if stage.name in expected:
            job, trial = build_job(recipe, stage), trials.get(stage.name)
            precision = job.spec.get("precision", "float32")
            times = _unit_seconds(calibration, parameters, precision, trial, expected[stage.name])
            stage_estimate = _estimate_stage(job, expected[stage.name], times, calibration.overhead)
            if stage_estimate is not None:
                estimates[stage.name] = stage_estimate
    return estimates


def run_trials(recipe: Recipe, tokenizer: Tokenizer, trial_cache: TrialCache) -> dict[str, Trial]:
    """Try the environment of each stage, once for each pair of environment and teacher."""
    from perilune.plan.trial import try_environment

    jobs = {stage.name: build_job(recipe, stage) for stage in recipe.stages}
    teachers = [job for job in jobs.values() if job.task == "collect"]
    trials = {}
    for name, job in jobs.items():
        if not job.environment:
            continue
        teacher = next((teacher for teacher in teachers if teacher.environment == job.environment), None)
        fields = {key: value for key, value in teacher.spec.items() if key != "traces"} if teacher else {}
        key = repr((job.environment, job.model, fields))
        if key not in trial_cache:
            try:
                trial_cache[key] = try_environment(job.environment, job.seed, tokenizer, teacher)
            except RequestError:  # its tasks cannot be read here
                trial_cache[key] = None
        if (trial := trial_cache[key]) is not None:
            trials[name] = trial
    return trials


def _unit_seconds(
    calibration: Calibration,
    parameters: int,
    precision: Precision,
    trial: Trial | None,
    expected: ExpectedLengths,
) -> Mapping[str, float]:
    overhead = calibration.overhead
    times = {"turn": overhead.turn, "step": overhead.step, "row": expected.low.reading}
    for step, token in (("decode", "sampled"), ("update", "learned"), ("reinforce", "reinforced")):
        times[step], times[token] = calibration.seconds(step, parameters, precision)
    times["forward"] = FORWARD_SHARE * times["learned"]
    if trial is None:
        return times | dict.fromkeys(("task", "episode", "trace", "scorer"), 0.0)
    times |= {"task": trial.task, "episode": trial.episode, "trace": trial.trace}
    return times | {"scorer": max(0.0, trial.start - overhead.scorer)}


def _estimate_stage(
    job: Job, expected: ExpectedLengths, times: Mapping[str, float], overhead: Overhead
) -> Estimate | None:
    from perilune.plan.work import count_work

    start = overhead.stages.get(OVERHEAD_OF.get(job.task, job.task))
    ends = list(zip((expected.low, expected.high), expected.live, strict=True))
    works = [count_work(job, lengths, live=live, rows=expected.rows) for lengths, live in ends]
    if start is None or None in works:
        return None
    low, high = (
        start + sum(amount * times[name] for name, amount in work.items())
        for work in works
        if work is not None
    )
    seconds = high if expected.at_most else (low + high) / 2
    memory = _estimate_memory(job, expected, overhead.memory.get(OVERHEAD_OF.get(job.task, job.task), 0))
    return Estimate(seconds, low, high, memory, expected.basis, expected.at_most)


def _estimate_memory(job: Job, expected: ExpectedLengths, process: int) -> int | None:
    """Return the peak with the expected lengths. The plan of the stage has room for the longest ones.

    `process` is the measured size of a process of this kind with little work, or 0.
    """
    from perilune.models.memory import PROCESS_BYTES, MemoryPlan, cache_bytes
    from perilune.tasks.stage.memory_plan import StageMemory, model_config

    planned = dict(load_plugin(job.task).plan(_without_files(job))).get("memory")
    if not isinstance(planned, StageMemory):
        return None
    plan: MemoryPlan = planned
    persistent = dict(planned.persistent)
    persistent["process"] += (process or PROCESS_BYTES) - PROCESS_BYTES
    spec, longest = job.spec, expected.high
    episodes = spec.get("prompts", spec.get("tasks", 0)) * spec.get("samples", 0)
    if budget := planned.token_budget:
        rows = spec.get("batch_size", 0) * (1 if job.task == "sft" else 2) or episodes
        ends = zip((expected.low, expected.high), expected.live, strict=True)
        tokens = [min(budget, live * rows * (end.prompt * end.distinct + end.fed)) for end, live in ends]
        plan = planned.replan(max(1, int(fmean(tokens))))
    if "cache" in persistent and episodes:
        length = int(longest.prompt + longest.fed) + 1
        persistent["cache"] = min(persistent["cache"], cache_bytes(model_config(job), episodes, length))
    return MemoryPlan(persistent, plan.transient).total


def _without_files(job: Job) -> Job:
    """Replace the user's own files in a job by stages, so that its plan does not read them again."""
    files = file_fields(load_plugin(job.task).spec, job.spec)
    return job.model_copy(update={"spec": {**job.spec, **dict.fromkeys(files, "data")}})


def sum_estimates(estimates: Mapping[str, Estimate]) -> Estimate:
    """Return the estimate for all stages, one after the other."""
    every = list(estimates.values())
    memory = max((part.memory or 0 for part in every), default=0) or None
    seconds, low, high = (
        sum(ends) for ends in zip(*((part.seconds, part.low, part.high) for part in every), strict=True)
    )
    return Estimate(seconds, low, high, memory, "", any(part.at_most for part in every))


def estimate_document(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    """Return the estimate as JSON: of all stages, and of each by its name."""
    stages = {name: asdict(value) for name, value in estimates.items()}
    return {"total": asdict(sum_estimates(estimates)), "stages": stages} if estimates else {}


def save_estimate(folder: Path, estimates: Mapping[str, Estimate]) -> None:
    """Write the estimate of an experiment, to compare it with the result."""
    if estimates:
        write_json(folder / ESTIMATE_FILE, {name: asdict(value) for name, value in estimates.items()})


def load_estimate(folder: Path) -> dict[str, Estimate]:
    """Read the estimate of an experiment by stage; empty without one."""
    try:
        return {name: Estimate(**fields) for name, fields in dict(read_json(folder / ESTIMATE_FILE)).items()}
    except (RequestError, OSError, TypeError):  # none, or of an earlier version
        return {}


def compare_with_estimate(
    estimated: Estimate | None, seconds: float | None, summary: Mapping[str, Any]
) -> dict[str, str]:
    """Compare the estimated time and memory of a stage with the measured ones, as lines."""
    lines = {}
    if estimated is not None and seconds:
        off = f"{seconds / estimated.seconds - 1:+.0%}"
        lines["time"] = f"estimated {estimated.seconds:,.0f} s, took {seconds:,.0f} s ({off})"
    if memory := summary.get("memory"):
        plan, peak = memory["planned_bytes"], memory["peak_bytes"]
        expected = estimated.memory if estimated is not None and estimated.memory else plan
        word = "planned" if expected == plan else "estimated"
        lines["memory"] = f"{word} {_gib(expected)}, peak {_gib(peak)} ({peak / expected - 1:+.0%})"
    return lines


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
