"""How long the stages of a recipe take on this machine, estimated from its calibration before they run.

The work of a stage is counted in tokens: sampled ones, and those of forward and backward passes. Their number
is known but for the length of answers. It is taken from the answers that the recipe's teacher writes to the
first tasks; without a teacher, answers count as long as they may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from perilune.cli.start.calibration import Calibration, load
from perilune.environments.core.registry import make_environment
from perilune.errors import RequestError
from perilune.files import read_json, write_json
from perilune.recipe.schema import job_for

if TYPE_CHECKING:
    from perilune.bundle.job import Job
    from perilune.models.text.tokenizer import Tokenizer
    from perilune.recipe.schema import Recipe

FILE = "estimate.json"  # in the folder of an experiment
TRIED = 8  # training tasks whose length is measured
IMITATING = ("sft", "preference", "reward_model")  # stages whose answers are those of data
FORWARD = 1 / 3  # time of a forward pass, in that of a training step


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of a prompt and of an answer."""

    prompt: float
    answer: float


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of a stage: sampled, trained on, and computed in forward passes alone."""

    sampled: float = 0.0
    learned: float = 0.0
    forward: float = 0.0


def estimate(recipe: Recipe, home: Path) -> dict[str, float]:
    """Seconds of each stage whose work can be counted; empty without a calibration or a language model."""
    calibration = load(home, recipe.resources.threads)
    if calibration is None or recipe.model is None or recipe.resources.device == "cuda":
        return {}
    from perilune.models.memory import card_of
    from perilune.models.text.tokenizer import Tokenizer
    from perilune.tasks.stage.memory_plan import section_config

    found = {}
    model = recipe.model.model_dump()
    parameters = card_of(section_config(model)).parameters
    tokenizer = Tokenizer.load(Path(model["path"])) if model["path"] else Tokenizer.for_new_model(model)
    answer = _teacher_answer(recipe)
    for stage in recipe.stages:
        job = job_for(recipe, stage)
        if not job.environment:
            continue  # files of the user's own, whose lengths are not read here
        imitates = stage.task in IMITATING or stage.spec.get("checkpoint") != "model"
        try:
            work = _work(job, _lengths(job, tokenizer, answer if imitates else None))
        except RequestError:  # of an environment whose tasks cannot be read here
            continue
        if work is not None:
            found[stage.name] = _seconds(work, calibration, parameters)
    return found


def _seconds(work: Work, calibration: Calibration, parameters: int) -> float:
    sampling, learning = (calibration.per_token(kind, parameters) for kind in ("sampling", "learning"))
    return calibration.start + work.sampled * sampling + (work.learned + FORWARD * work.forward) * learning


def _work(job: Job, lengths: Lengths) -> Work | None:
    spec, prompt = job.spec, lengths.prompt
    answer = min(lengths.answer, spec["max_tokens"]) if "max_tokens" in spec else lengths.answer
    match job.task:
        case "rl" | "distill":
            tasks = spec["steps"] * spec["prompts"]
            fed = tasks * (prompt + spec["samples"] * answer)
            passes = spec.get("epochs_per_batch", 1)
            extra = fed if job.task == "distill" or spec.get("kl") else 0.0
            work = Work(tasks * spec["samples"] * answer, passes * fed, tasks * prompt + extra)
        case "sft":
            work = Work(learned=spec["steps"] * spec["batch_size"] * (prompt + answer))
        case "preference" | "reward_model":
            work = Work(learned=spec["steps"] * spec["batch_size"] * (prompt + 2 * answer))
        case "evaluate":
            work = Work(spec["tasks"] * (spec["samples"] + 1) * answer, forward=2 * spec["tasks"] * prompt)
        case "rejection_sampling" | "pairs":
            work = Work(spec["tasks"] * spec["samples"] * answer, forward=spec["tasks"] * prompt)
        case "flywheel":
            sampled = spec["tasks"] * spec["samples"] + 4 * spec["heldout"]
            learned = spec["updates"] * spec["batch_size"] * (prompt + answer)
            work = Work(spec["steps"] * sampled * answer, spec["steps"] * learned)
        case _:
            return None
    return _with_evaluations(work, job, lengths)


def _with_evaluations(work: Work, job: Job, lengths: Lengths) -> Work:
    if not job.spec.get("eval"):
        return work
    from perilune.tasks.stage.evaluation_settings import EvaluationSettings

    settings = EvaluationSettings.model_validate(job.spec["eval"])
    tasks = len(settings.steps(job.spec["steps"])) * len(settings.sections(job.environment)) * settings.tasks
    answer = min(lengths.answer, settings.max_tokens or lengths.answer)
    return Work(
        work.sampled + tasks * settings.samples * answer, work.learned, work.forward + tasks * lengths.prompt
    )


def _lengths(job: Job, tokenizer: Tokenizer, answer: float | None) -> Lengths:
    """The mean prompt of the first tasks; the answer is as long as allowed unless it is given."""
    tasks = list(islice(make_environment(job.environment).tasks("train", job.seed), TRIED))
    prompts = [len(tokenizer.encode_prompt(task.prompt)) for task in tasks if task.prompt]
    most = float(job.spec.get("max_tokens") or 64)
    return Lengths(fmean(prompts) if prompts else 0.0, most if answer is None else answer)


def _teacher_answer(recipe: Recipe) -> float | None:
    """Mean tokens of the answers of the recipe's first teacher, in characters of a new model's vocabulary."""
    stage = next((one for one in recipe.stages if one.task == "collect"), None)
    if stage is None or recipe.model is None or not recipe.model.preset:
        return None
    from perilune.data.generators.registry import make_teacher
    from perilune.data.generators.teacher import prepare

    job = job_for(recipe, stage)
    teacher = make_teacher(stage.spec["teacher"], stage.spec["strategies"], stage.spec["options"])
    environment = make_environment(job.environment)
    prepare(teacher, environment)
    tasks = islice(environment.tasks("train", job.seed), 8 * TRIED)
    answers = [len(one.text) + 1 for one in teacher.candidates(tasks, job.seed) if not one.earlier]
    return fmean(answers) if answers else None


def keep_estimate(folder: Path, seconds: Mapping[str, float]) -> None:
    """Write the estimate of an experiment, to compare it with what happens."""
    if seconds:
        write_json(folder / FILE, dict(seconds))


def compared(folder: Path, stage: str, summary: Mapping[str, Any]) -> dict[str, str]:
    """The estimated time of a stage beside its seconds, and its planned memory beside the peak, as lines."""
    lines = {}
    took = summary.get("seconds")
    expected = read_json(folder / FILE).get(stage) if (folder / FILE).exists() else None
    if expected and took:
        lines["time"] = f"estimated {expected:,.0f} s, took {took:,.0f} s ({took / expected - 1:+.0%})"
    memory = summary.get("memory")
    if memory:
        planned, peak = memory["planned_bytes"], memory["peak_bytes"]
        lines["memory"] = (
            f"planned {planned / 2**30:.2f} GiB, peak {peak / 2**30:.2f} GiB ({peak / planned - 1:+.0%})"
        )
    return lines
