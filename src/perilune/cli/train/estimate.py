"""How long the stages of a recipe take on this machine, and their peak memory, estimated before they run.

The work of a stage (`work`) depends on the lengths of its episodes (`lengths`). The calibration of this
machine and a trial of the environment say how long each part of it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from perilune.bundle.machine import usable_threads
from perilune.bundle.plugin import file_fields, load_plugin
from perilune.cli.start.calibration import Calibration, Overhead, load
from perilune.cli.units import duration, size
from perilune.errors import RequestError
from perilune.files import read_json, write_json
from perilune.recipe.schema import build_job

if TYPE_CHECKING:
    from perilune.bundle.job import Job, Resources
    from perilune.cli.train.lengths import Expected
    from perilune.cli.train.trial import Trial
    from perilune.cli.train.work import Work
    from perilune.control.runs.experiments import Control
    from perilune.models.text.tokenizer import Tokenizer
    from perilune.recipe.schema import Recipe

FILE = "estimate.json"  # in the folder of an experiment
FORWARD = 1 / 3  # time of a forward pass, in that of a training step
LIKE = {  # whose overhead a stage has, if not that of its own kind
    **dict.fromkeys(("selfplay", "distill", "flywheel"), "rl"),
    **dict.fromkeys(("preference", "reward_model"), "sft"),
    **dict.fromkeys(("rejection_sampling", "pairs"), "evaluate"),
}


Tried = dict[str, "Trial | None"]
"""Trials by environment, model and teacher; None for an environment that cannot be tried here."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate for a stage.

    Attributes:
        seconds: from its submission to its end; `low` and `high` are its range.
        memory: peak bytes of its process; None for a stage without a memory plan.
        basis: how the lengths of its answers are known, in words.
        at_most: whether `high` is a limit, and nothing else is known.
    """

    seconds: float
    low: float
    high: float
    memory: int | None
    basis: str
    at_most: bool = False

    def __str__(self) -> str:
        middle = f"at most {duration(self.high)}" if self.at_most else f"about {duration(self.seconds)}"
        if not self.at_most and self.high > 1.1 * self.low:
            middle += f" ({duration(self.low)} to {duration(self.high)})"
        memory = "" if self.memory is None else f", {size(self.memory)} of memory"
        return f"{middle}{memory}" + (f"; {self.basis}" if self.basis else "")


def device_of(resources: Resources) -> str:
    """The device of a recipe, as calibrations name it: "cuda", or a number of threads."""
    if resources.device == "cuda" or (resources.device == "auto" and Path("/dev/nvidia0").exists()):
        return "cuda"
    return str(resources.threads or usable_threads())


def estimate(control: Control, recipe: Recipe, tried: Tried) -> dict[str, Estimate]:
    """The estimate for each stage whose work can be counted.

    Empty without a calibration of the recipe's device, and without a language model.

    Args:
        tried: trials of environments that were made before; new ones are added.
    """
    calibration = load(control.home.root, device_of(recipe.resources))
    if calibration is None or recipe.model is None:
        return {}
    from perilune.cli.train.lengths import expected_lengths
    from perilune.models.memory import get_model_card
    from perilune.models.text.template_facts import recipe_tokenizer
    from perilune.tasks.stage.memory_plan import section_config

    model = recipe.model.model_dump()
    parameters = get_model_card(section_config(model)).parameters
    tokenizer = recipe_tokenizer(model)
    trials = trials_of(recipe, tokenizer, tried)
    expected = expected_lengths(control, recipe, trials, tokenizer)
    found = {}
    for stage in recipe.stages:
        if stage.name in expected:
            job, trial = build_job(recipe, stage), trials.get(stage.name)
            times = _times(calibration, parameters, trial, expected[stage.name])
            one = _estimate(job, expected[stage.name], times, calibration.overhead)
            if one is not None:
                found[stage.name] = one
    return found


def trials_of(recipe: Recipe, tokenizer: Tokenizer, tried: Tried) -> dict[str, Trial]:
    """A trial of the environment of each stage; each environment is tried once with each teacher."""
    from perilune.cli.train.trial import try_environment

    jobs = {stage.name: build_job(recipe, stage) for stage in recipe.stages}
    teachers = [job for job in jobs.values() if job.task == "collect"]
    found = {}
    for name, job in jobs.items():
        if not job.environment:
            continue
        teacher = next((one for one in teachers if one.environment == job.environment), None)
        asked = {} if teacher is None else {key: teacher.spec[key] for key in teacher.spec if key != "traces"}
        key = repr((job.environment, job.model, asked))
        if key not in tried:
            try:
                tried[key] = try_environment(job.environment, job.seed, tokenizer, teacher)
            except RequestError:  # its tasks cannot be read here
                tried[key] = None
        if (trial := tried[key]) is not None:
            found[name] = trial
    return found


def _times(
    calibration: Calibration, parameters: int, trial: Trial | None, expected: Expected
) -> Mapping[str, float]:
    """Seconds of each unit of work."""
    overhead = calibration.overhead
    times = {"turn": overhead.turn, "step": overhead.step, "row": expected.low.reading}
    for step, token in (("decode", "sampled"), ("update", "learned"), ("reinforce", "reinforced")):
        times[step], times[token] = calibration.seconds(step, parameters)
    times["forward"] = FORWARD * times["learned"]
    if trial is None:
        return times | dict.fromkeys(("task", "episode", "trace", "scorer"), 0.0)
    times |= {"task": trial.task, "episode": trial.episode, "trace": trial.trace}
    return times | {"scorer": max(0.0, trial.start - overhead.scorer)}


def _estimate(
    job: Job, expected: Expected, times: Mapping[str, float], overhead: Overhead
) -> Estimate | None:
    from perilune.cli.train.work import work_of

    start = overhead.stages.get(LIKE.get(job.task, job.task))
    ends = list(zip((expected.low, expected.high), expected.live, strict=True))
    works = [work_of(job, lengths, live=live, rows=expected.rows) for lengths, live in ends]
    if start is None or None in works:
        return None
    low, high = (start + _seconds(work, times) for work in works if work is not None)
    seconds = high if expected.at_most else (low + high) / 2
    memory = _memory(job, expected, overhead.memory.get(LIKE.get(job.task, job.task), 0))
    return Estimate(seconds, low, high, memory, expected.basis, expected.at_most)


def _seconds(work: Work, times: Mapping[str, float]) -> float:
    return sum(amount * times[name] for name, amount in work.items())


def _memory(job: Job, expected: Expected, process: int) -> int | None:
    """The peak with the expected lengths. The plan of the stage has room for the longest ones.

    Args:
        process: bytes of a process of this kind with little work, as measured; 0 if it was not.
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
        tokens = [min(budget, live * rows * (one.prompt * one.distinct + one.fed)) for one, live in ends]
        plan = planned.replan(max(1, int(fmean(tokens))))
    if "cache" in persistent and episodes:
        length = int(longest.prompt + longest.fed) + 1
        persistent["cache"] = min(persistent["cache"], cache_bytes(model_config(job), episodes, length))
    return MemoryPlan(persistent, plan.transient).total


def _without_files(job: Job) -> Job:
    """The job with stages in place of the user's own files, which its plan then does not read again."""
    files = file_fields(load_plugin(job.task).spec, job.spec)
    return job.model_copy(update={"spec": {**job.spec, **dict.fromkeys(files, "data")}})


def total(found: Mapping[str, Estimate]) -> Estimate:
    """The estimate for all stages, one after the other."""
    every = list(found.values())
    memory = max((one.memory or 0 for one in every), default=0) or None
    seconds, low, high = (
        sum(ends) for ends in zip(*((one.seconds, one.low, one.high) for one in every), strict=True)
    )
    return Estimate(seconds, low, high, memory, "", any(one.at_most for one in every))


def estimate_document(found: Mapping[str, Estimate]) -> dict[str, Any]:
    """The estimate as JSON: of all stages, and of each by its name."""
    stages = {name: asdict(one) for name, one in found.items()}
    return {"total": asdict(total(found)), "stages": stages} if found else {}


def keep_estimate(folder: Path, found: Mapping[str, Estimate]) -> None:
    """Write the estimate of an experiment, to compare it with what happens."""
    if found:
        write_json(folder / FILE, {name: asdict(one) for name, one in found.items()})


def kept_estimate(folder: Path) -> dict[str, Estimate]:
    """The estimate of an experiment by stage; empty without one."""
    try:
        return {name: Estimate(**one) for name, one in dict(read_json(folder / FILE)).items()}
    except (RequestError, OSError, TypeError):  # none, or of an earlier version
        return {}


def compared(estimated: Estimate | None, seconds: float | None, summary: Mapping[str, Any]) -> dict[str, str]:
    """The estimated time of a stage beside the real one, and its memory beside the peak, as lines."""
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
