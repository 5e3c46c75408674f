"""Expected lengths of the episodes of each stage of a recipe, before it runs.

They are those of the last finished run of the same stage. Without one, a policy that imitates data writes
answers of the lengths in the data. Lengths change during reinforcement learning, so there the estimate is a
range. Without any information, answers have the maximum length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from sqlalchemy import select

from perilune.bundle.plugin import file_fields, load_plugin
from perilune.control.record.store import Experiment, Run
from perilune.control.record.transitions import RunState
from perilune.data.sources import read_rows
from perilune.files import read_json, read_json_lines
from perilune.plan.trial import MAX_ROWS, Lengths, Trial, lengths_of_rows
from perilune.recipe.schema import MODEL, build_job

if TYPE_CHECKING:
    from perilune.bundle.job import Job
    from perilune.control.runs.experiments import Control
    from perilune.models.text.tokenizer import Tokenizer
    from perilune.recipe.schema import Recipe, Stage

LEARNING_TASKS = ("rl", "selfplay", "distill", "flywheel")  # stages whose policy changes on its own answers
PAIRED_TASKS = ("preference", "reward_model")
MIN_LIVE_SHARE = 0.25  # share of live groups at the low end of a range


@dataclass(frozen=True, slots=True)
class ExpectedLengths:
    """The expected lengths of a stage, as the low and the high end of a range.

    Attributes:
        live: share of the groups that have a gradient.
        rows: number of rows of data that it reads.
        basis: source of the lengths, in words.
        at_most: True if the high end is a limit, and nothing else is known.
    """

    low: Lengths
    high: Lengths
    live: tuple[float, float] = (1.0, 1.0)
    rows: float = 0.0
    basis: str = ""
    at_most: bool = False


def estimate_lengths(
    control: Control, recipe: Recipe, trials: Mapping[str, Trial], tokenizer: Tokenizer
) -> dict[str, ExpectedLengths]:
    """Estimate the lengths of each stage.

    Args:
        trials: of the environment of each stage that has one.
    """
    expected: dict[str, ExpectedLengths] = {}
    for stage in recipe.stages:
        job = build_job(recipe, stage)
        lengths = _lengths_of_data(stage, job, expected, tokenizer) or _lengths_of_policy(
            stage, job, expected, trials.get(stage.name)
        )
        if lengths is not None:
            expected[stage.name] = _use_last_run(control, recipe.name, job, lengths)
    return expected


def _lengths_of_data(
    stage: Stage, job: Job, known: Mapping[str, ExpectedLengths], tokenizer: Tokenizer
) -> ExpectedLengths | None:
    """Return the lengths of the rows that a stage trains on: of another stage, or of the user's file."""
    pairs = stage.task in PAIRED_TASKS
    if not pairs and stage.task != "sft":
        return None
    for path in file_fields(load_plugin(stage.task).spec, job.spec).values():
        rows = read_rows(Path(path))
        first = list(islice(rows, MAX_ROWS))
        lengths = lengths_of_rows(first, tokenizer, pairs=pairs)
        if lengths is None:
            return None
        count = len(first) + sum(1 for _ in rows)
        return ExpectedLengths(lengths, lengths, rows=count, basis=f"rows of {Path(path).name}")
    source = known.get(stage.consumes.get("data", ""))
    return None if source is None else replace(source, live=(1.0, 1.0))


def _lengths_of_policy(
    stage: Stage, job: Job, known: Mapping[str, ExpectedLengths], trial: Trial | None
) -> ExpectedLengths | None:
    if trial is None:
        return None
    if stage.task == "collect":
        if (lengths := trial.lengths) is None:
            return None
        basis = "answers as long as the teacher's"
        return ExpectedLengths(lengths, lengths, rows=job.spec["traces"], basis=basis)
    source = known.get(stage.consumes.get("checkpoint", MODEL))
    most = float(job.spec.get("max_tokens") or 64)
    rows = job.spec.get("tasks", 0) * job.spec.get("pairs_per_task", 1)
    if source is None:
        limit = Lengths(trial.prompt, most, most, most)
        return ExpectedLengths(limit, limit, rows=rows, basis="answers as long as max_tokens", at_most=True)
    low = _cap_lengths(replace(source.low, prompt=trial.prompt or source.low.prompt), most)
    if stage.task not in LEARNING_TASKS:
        return replace(source, low=low, high=_cap_lengths(source.high, most), live=(1.0, 1.0), rows=rows)
    longer = source.high.longest / max(1.0, source.high.sampled)
    high = replace(low, fed=low.fed + low.sampled * (longer - 1), sampled=low.sampled * longer)
    return replace(source, low=low, high=_cap_lengths(high, most), live=(MIN_LIVE_SHARE, 1.0), rows=rows)


def _cap_lengths(lengths: Lengths, most: float) -> Lengths:
    """Cap the lengths at `most` tokens in a turn."""
    limit = most * lengths.turns
    cut = max(0.0, lengths.sampled - limit)
    return replace(
        lengths, fed=lengths.fed - cut, sampled=lengths.sampled - cut, longest=min(lengths.longest, limit)
    )


def _use_last_run(control: Control, recipe: str, job: Job, found: ExpectedLengths) -> ExpectedLengths:
    """Replace the lengths by those of the latest finished run of the same stage, if there is one."""
    folder = find_finished_run(control, recipe, job)
    if folder is None or "samples" not in job.spec:
        return found
    summary = read_json(folder / "artifacts" / "summary.json")
    lines = list(read_json_lines(folder / "artifacts" / "metrics.jsonl"))
    lines = [line for line in lines if isinstance(line.get("length"), int | float)]
    mean = fmean(line["length"] for line in lines) if lines else (summary.get("length") or {}).get("mean")
    if not mean:
        return found
    least = found.low
    scale = mean / max(1.0, least.sampled)
    actual = replace(
        least, fed=least.fed + mean - least.sampled, sampled=mean, longest=max(least.longest * scale, mean)
    )
    live = found.live
    if lines and job.task in ("rl", "selfplay"):
        trained = fmean(line.get("tokens", 0.0) for line in lines) / job.spec.get("epochs_per_batch", 1)
        share = trained / (job.spec["prompts"] * job.spec["samples"] * mean)
        live = (min(share, 1.0),) * 2
    return replace(
        found, low=actual, high=actual, live=live, basis="answers as long as in the last run", at_most=False
    )


def find_finished_run(control: Control, recipe: str, job: Job) -> Path | None:
    """Find the folder of the latest finished run of this stage with the same model, environment and limit."""
    query = (
        select(Run)
        .join(Experiment, Experiment.id == Run.experiment_id)
        .where(Experiment.name == recipe, Run.stage == job.stage, Run.state == RunState.SUCCEEDED.value)
        .order_by(Run.ended.desc())
    )
    for run in control.store.read(query):
        folder = control.directory(run)
        before = read_json(folder / "job.json")
        same = all(before.get(key) == getattr(job, key) for key in ("task", "model", "environment"))
        if same and before["spec"].get("max_tokens") == job.spec.get("max_tokens"):
            return folder
    return None
