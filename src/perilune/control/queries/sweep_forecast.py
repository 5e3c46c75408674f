"""Forecast a sweep: the stages that its arms share, the finished ones, and the time that the rest takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import func, select

from perilune.control.queries.lookup import stage_statuses
from perilune.control.record.store import Attempt, Experiment, Run
from perilune.control.record.transitions import RunState
from perilune.control.runs.experiments import Control, StagePlan, plan_stages
from perilune.control.runs.templates import Template
from perilune.files import canonical_json, sha256_bytes
from perilune.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class ArmForecast:
    """The forecast of one experiment of a sweep.

    Attributes:
        experiment: its id if it was submitted before.
        stages: number of its stages.
        to_run: stages that it still has to run.
        shared: number of stages that an earlier arm of the sweep runs too.
        done: number of other stages that have finished.
    """

    experiment: str | None
    stages: int
    shared: int
    done: int
    to_run: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SweepForecast:
    """The forecast of a sweep.

    Attributes:
        to_run: number of runs that are still to be made, by stage.
        seconds: expected time of these runs one after the other, from finished runs of the same stages of
            this recipe; None if some stage has never been finished here.
    """

    arms: tuple[ArmForecast, ...]
    to_run: Mapping[str, int]
    seconds: float | None


def forecast_sweep(control: Control, recipes: Sequence[Recipe], template: Template) -> SweepForecast:
    arms, to_run, seen = [], dict[str, int](), set[str]()
    for recipe in recipes:
        experiment = _find_experiment(control, recipe)
        statuses = stage_statuses(control, [experiment]) if experiment else []
        finished = {status.name for status in statuses if status.state == RunState.SUCCEEDED}
        keys = compute_stage_keys(plan_stages(recipe, template))
        fresh = {name for name, key in keys.items() if key not in seen}
        left = tuple(name for name in keys if name in fresh - finished)
        for name in left:
            to_run[name] = to_run.get(name, 0) + 1
        shared = len(keys) - len(fresh)
        arms.append(ArmForecast(experiment, len(keys), shared, len(fresh & finished), left))
        seen |= set(keys.values())
    return SweepForecast(tuple(arms), to_run, _expected_seconds(control, recipes[0].name, to_run))


def compute_stage_keys(plans: Sequence[StagePlan]) -> dict[str, str]:
    """Return a key for each stage. Stages with the same key will have the same bundle."""
    keys: dict[str, str] = {}
    for plan in plans:
        sources = {field: keys.get(source, source) for field, source in plan.consumes.items()}
        keys[plan.name] = sha256_bytes(canonical_json([plan.job.model_dump(mode="json"), sources]))
    return keys


def _find_experiment(control: Control, recipe: Recipe) -> str | None:
    digest = sha256_bytes(canonical_json(recipe.model_dump(mode="json")))
    known = control.store.read(select(Experiment.id).where(Experiment.recipe_digest == digest))
    return known[0] if known else None


def _expected_seconds(control: Control, recipe: str, to_run: Mapping[str, int]) -> float | None:
    query = (
        select(Run.stage, func.avg(Attempt.ended - Attempt.created))
        .join(Attempt, (Attempt.run_id == Run.id) & (Attempt.number == Run.current_epoch))
        .join(Experiment, Experiment.id == Run.experiment_id)
        .where(Experiment.name == recipe, Run.state == RunState.SUCCEEDED.value)
        .group_by(Run.stage)
    )
    with control.store.snapshot() as session:
        measured = {stage: float(seconds) for stage, seconds in session.execute(query)}
    if not to_run.keys() <= measured.keys():
        return None
    return sum(count * measured[stage] for stage, count in to_run.items())
