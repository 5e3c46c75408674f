"""Returns views of the experiments and runs of a home, or of a folder. Writes nothing."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from perilune.control.queries.lookup import (
    StageStatus,
    attempt_uses,
    find_experiment,
    find_run_or_experiment,
    stage_statuses,
)
from perilune.control.record.store import Experiment, Run
from perilune.control.runs.experiments import Control
from perilune.errors import RequestError
from perilune.files import read_json
from perilune.ui.view import ExperimentView, StageView, derive_seed, read_state, view_folder

PATH_PREFIXES = (".", "/", "~")  # a target that starts so is a path


def view_target(target: str) -> ExperimentView:
    """Return the view of a folder, of an experiment with all its stages, or of a run as its only stage.

    Raises:
        RequestError: when `target` is none of them.
    """
    if target.startswith(PATH_PREFIXES):
        return view_folder(Path(target).expanduser())
    control = Control()
    try:
        return view_in_home(control, target)
    except RequestError:
        if Path(target).is_dir():
            return view_folder(Path(target))
        raise


def view_in_home(control: Control, target: str) -> ExperimentView:
    """Return the view of an experiment or a run of a home.

    Raises:
        RequestError: when `target` is neither.
    """
    try:
        named: Run | Experiment = find_experiment(control, target)
    except RequestError:
        named = find_run_or_experiment(control, target)
    if isinstance(named, Experiment):
        return view_experiment(control, named.id, stage_statuses(control, [named.id]))
    statuses = stage_statuses(control, [named.experiment_id])
    return view_experiment(
        control, named.experiment_id, [item for item in statuses if item.run_id == named.id]
    )


def view_experiment(control: Control, experiment_id: str, statuses: Sequence[StageStatus]) -> ExperimentView:
    """Return the view of an experiment with the stages in `statuses`. Shows the error of a damaged recipe."""
    stages = tuple(view_stage(control, status) for status in statuses)
    placed = tuple(attempt_uses(control, [status.run_id for status in statuses if status.run_id]))
    try:
        name, seed, text, declared = _read_recipe(control.home.experiment(experiment_id) / "recipe.json")
    except RequestError as error:
        return ExperimentView(statuses[0].experiment, derive_seed(stages), f"# {error}\n", stages, placed)
    return ExperimentView(name, seed, text, stages, placed, declared)


@lru_cache(maxsize=64)  # a recipe never changes, and the live page polls it
def _read_recipe(path: Path) -> tuple[str, int, str, dict[str, dict[str, Any]]]:
    """Return the name and the seed of a recipe, its YAML, and the settings of its stages by name."""
    document = read_json(path)
    try:
        declared = {stage["name"]: dict(stage["spec"]) for stage in document["stages"]}
        text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
        return str(document["name"]), int(document["seed"]), text, declared
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RequestError("not the recipe of an experiment", where=str(path)) from None


def view_stage(control: Control, status: StageStatus) -> StageView:
    """Return one stage. An active run may have ended without a record in the store, so its files decide."""
    state, cause, folder, run_id = status.state, status.cause, status.attempt_dir, status.run_id
    if state == "active" and folder is not None:
        state, cause = read_state(folder)
    here = not run_id or not control.reconciler.placements.capabilities(run_id).is_remote
    return StageView(status.name, status.task, run_id, state, folder, status.attempts, cause, here)
