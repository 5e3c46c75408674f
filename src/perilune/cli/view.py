"""What the interface is told about an experiment, gathered from the control plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from perilune.files import read_json
from perilune.ui.view import ExperimentView, StageView

if TYPE_CHECKING:
    from perilune.control.queries.lookup import StageStatus
    from perilune.control.runs.experiments import Control


def experiment_view(control: Control, experiment_id: str, statuses: Sequence[StageStatus]) -> ExperimentView:
    """An experiment whose stages stand as `statuses` say."""
    import yaml

    document = read_json(control.home.experiment(experiment_id) / "recipe.json")
    stages = tuple(
        StageView(one.name, one.task, one.run_id, one.state, one.attempt_dir, one.attempts, one.cause)
        for one in statuses
    )
    recipe = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return ExperimentView(str(document["name"]), int(document["seed"]), recipe, stages)
