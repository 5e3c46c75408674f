"""What the interface is told about an experiment, gathered from the control plane."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perilune.ui.view import ExperimentView, StageView

if TYPE_CHECKING:
    from perilune.control.experiments import Control


def experiment_view(control: Control, experiment_id: str) -> ExperimentView:
    """The experiment as recorded now; each stage with the evidence of its latest attempt.

    Raises:
        sqlalchemy.exc.NoResultFound: when there is no such experiment.
    """
    import yaml
    from sqlalchemy import select

    from perilune.control.store import Experiment, Run, Stage
    from perilune.files import read_json

    document = read_json(control.home.experiment(experiment_id) / "recipe.json")
    tasks = {stage["name"]: stage["task"] for stage in document["stages"]}
    stages = []
    with control.store.snapshot() as session:
        experiment = session.get_one(Experiment, experiment_id)
        query = select(Stage).where(Stage.experiment_id == experiment_id).order_by(Stage.position)
        for stage in session.scalars(query):
            if stage.run_id is None:
                stages.append(StageView(stage.name, tasks[stage.name], "", "queued", None, 0))
                continue
            run = session.get_one(Run, stage.run_id)
            evidence = control.home.attempt(run.id, run.current_epoch) if run.current_epoch else None
            stages.append(
                StageView(stage.name, run.task, run.id, run.state, evidence, run.current_epoch, run.cause)
            )
    recipe = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return ExperimentView(experiment.name, int(document["seed"]), recipe, tuple(stages))
