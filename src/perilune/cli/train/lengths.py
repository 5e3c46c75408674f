"""How long the episodes of each stage of a recipe will be, from what is known before it runs.

A finished run of the same stage tells it. Else a policy that imitates data writes answers as long as those.
During reinforcement learning the lengths move, so there the estimate is a range. Where nothing is known,
answers count as long as they may be.
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
from perilune.cli.train.trial import ROWS, Lengths, Trial, lengths_of_rows
from perilune.control.record.store import Experiment, Run
from perilune.control.record.transitions import RunState
from perilune.files import read_json, read_json_lines
from perilune.recipe.schema import MODEL, build_job

if TYPE_CHECKING:
    from perilune.bundle.job import Job
    from perilune.control.runs.experiments import Control
    from perilune.models.text.tokenizer import Tokenizer
    from perilune.recipe.schema import Recipe, Stage

LEARNING = ("rl", "selfplay", "distill", "flywheel")  # stages whose policy changes on its own answers
PAIRED = ("preference", "reward_model")
LEAST_LIVE = 0.25  # share of live groups at the low end of a range


@dataclass(frozen=True, slots=True)
class Expected:
    """What is expected of a stage, as the low and the high end of a range.

    Attributes:
        live: share of the groups that have a gradient.
        rows: rows of data that it reads.
        basis: how the lengths are known, in words.
        at_most: whether the high end is a limit, and nothing else is known.
    """

    low: Lengths
    high: Lengths
    live: tuple[float, float] = (1.0, 1.0)
    rows: float = 0.0
    basis: str = ""
    at_most: bool = False


def expected_lengths(
    control: Control, recipe: Recipe, trials: Mapping[str, Trial], tokenizer: Tokenizer
) -> dict[str, Expected]:
    """The lengths of each stage.

    Args:
        trials: of the environment of each stage that has one.
    """
    known: dict[str, Expected] = {}
    for stage in recipe.stages:
        job = build_job(recipe, stage)
        found = _from_data(stage, job, known, tokenizer) or _of_policy(
            stage, job, known, trials.get(stage.name)
        )
        if found is not None:
            known[stage.name] = _as_before(control, recipe.name, job, found)
    return known


def _from_data(
    stage: Stage, job: Job, known: Mapping[str, Expected], tokenizer: Tokenizer
) -> Expected | None:
    """What a stage that trains on data reads: rows of a stage, or of the user's own file."""
    pairs = stage.task in PAIRED
    if not pairs and stage.task != "sft":
        return None
    for path in file_fields(load_plugin(stage.task).spec, job.spec).values():
        from perilune.data.sources import read_rows

        rows = read_rows(Path(path))
        first = list(islice(rows, ROWS))
        lengths = lengths_of_rows(first, tokenizer, pairs=pairs)
        if lengths is None:
            return None
        count = len(first) + sum(1 for _ in rows)
        return Expected(lengths, lengths, rows=count, basis=f"rows of {Path(path).name}")
    source = known.get(stage.consumes.get("data", ""))
    return None if source is None else replace(source, live=(1.0, 1.0))


def _of_policy(stage: Stage, job: Job, known: Mapping[str, Expected], trial: Trial | None) -> Expected | None:
    """What a stage samples, or what a teacher writes."""
    if trial is None:
        return None
    if stage.task == "collect":
        lengths = trial.lengths
        basis = "answers as long as the teacher's"
        return None if lengths is None else Expected(lengths, lengths, rows=job.spec["traces"], basis=basis)
    source = known.get(stage.consumes.get("checkpoint", MODEL))
    most = float(job.spec.get("max_tokens") or 64)
    rows = job.spec.get("tasks", 0) * job.spec.get("pairs_per_task", 1)
    if source is None:
        limit = Lengths(trial.prompt, most, most, most)
        return Expected(limit, limit, rows=rows, basis="answers as long as max_tokens", at_most=True)
    low = _capped(replace(source.low, prompt=trial.prompt or source.low.prompt), most)
    if stage.task not in LEARNING:
        return replace(source, low=low, high=_capped(source.high, most), live=(1.0, 1.0), rows=rows)
    longer = source.high.longest / max(1.0, source.high.sampled)
    high = replace(low, fed=low.fed + low.sampled * (longer - 1), sampled=low.sampled * longer)
    return replace(source, low=low, high=_capped(high, most), live=(LEAST_LIVE, 1.0), rows=rows)


def _capped(lengths: Lengths, most: float) -> Lengths:
    """The lengths with at most `most` tokens in a turn."""
    limit = most * lengths.turns
    cut = max(0.0, lengths.sampled - limit)
    return replace(
        lengths,
        fed=lengths.fed - cut,
        sampled=lengths.sampled - cut,
        longest=min(lengths.longest, limit),
    )


def _as_before(control: Control, recipe: str, job: Job, found: Expected) -> Expected:
    """The lengths that the latest finished run of the same stage had in this home, if there is one."""
    folder = finished_run(control, recipe, job)
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
    own = replace(
        least, fed=least.fed + mean - least.sampled, sampled=mean, longest=max(least.longest * scale, mean)
    )
    live = found.live
    if lines and job.task in ("rl", "selfplay"):
        trained = fmean(line.get("tokens", 0.0) for line in lines) / job.spec.get("epochs_per_batch", 1)
        share = trained / (job.spec["prompts"] * job.spec["samples"] * mean)
        live = (min(share, 1.0),) * 2
    return replace(
        found, low=own, high=own, live=live, basis="answers as long as in the last run", at_most=False
    )


def finished_run(control: Control, recipe: str, job: Job) -> Path | None:
    """The folder of the latest finished run of this stage with the same model, environment and limit."""
    query = (
        select(Run)
        .join(Experiment, Experiment.id == Run.experiment_id)
        .where(Experiment.name == recipe, Run.stage == job.stage, Run.state == RunState.SUCCEEDED.value)
        .order_by(Run.ended.desc())
    )
    with control.store.snapshot() as session:
        runs = list(session.scalars(query))
    for run in runs:
        folder = control.directory(run)
        before = read_json(folder / "job.json")
        same = all(before.get(key) == getattr(job, key) for key in ("task", "model", "environment"))
        if same and before["spec"].get("max_tokens") == job.spec.get("max_tokens"):
            return folder
    return None
