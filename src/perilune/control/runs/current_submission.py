"""What is wanted of an experiment: its stages, one after the other, until one fails or it is cancelled.

The wish is recorded in the transaction that accepts its first run, and it ends in the one that records a
stage's failure, the wish to cancel, or that all is done. So whoever finds it may go on with it, and whoever
does not must not. A stage that has a run under the present wish is not submitted again, whoever asks.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from perilune.control.record.store import Experiment, Run, Stage, Store, record
from perilune.control.record.transitions import RunState
from perilune.control.runs.templates import Template
from perilune.errors import WorkFailedError

BLOCKED = "experiment.blocked"  # event: its next stage could not be begun
LIVE = (RunState.QUEUED.value, RunState.ACTIVE.value)


class ExperimentCancelledError(WorkFailedError):
    """The experiment was cancelled while nothing of it was under way."""


def open_submission(session: Session, experiment_id: str, template: Template | None) -> None:
    """A user asks for the experiment: from its first stage, at that place."""
    experiment = session.get_one(Experiment, experiment_id)
    experiment.submission += 1
    experiment.requested = True
    experiment.template = None if template is None else template.model_dump(mode="json")
    record(session, "experiment.submitted", experiment=experiment_id, submission=experiment.submission)


def run_of_stage(session: Session, experiment_id: str, stage: str) -> Run | None:
    """The run that a stage has under the present wish.

    Raises:
        NotWantedError: when it has none, and the experiment is not wanted any more.
    """
    experiment = session.get_one(Experiment, experiment_id)
    mine = (Stage.experiment_id == experiment_id) & (Stage.submission == experiment.submission)
    query = select(Run).join(Stage, Stage.run_id == Run.id).where(mine, Stage.name == stage)
    run = session.scalars(query).one_or_none()
    if run is None and not experiment.requested:
        raise ExperimentCancelledError(
            "the experiment was cancelled",
            where=f"stage {stage}",
            remedy="the same command takes it up again",
        )
    return run


def end_submissions_of(session: Session, run: Run, why: str) -> None:
    """End the wishes of all experiments for whose stage this run stands: no further stage is begun."""
    for experiment in session.scalars(_requesting(run)):
        end_submission(session, experiment, why, run)


def end_submission(session: Session, experiment: Experiment, why: str, run: Run | None = None) -> None:
    """No further stage of the experiment is begun from now on."""
    if experiment.requested:
        experiment.requested = False
        record(session, f"experiment.{why}", experiment=experiment.id, by="" if run is None else run.id)


def runs_under_way(session: Session, experiment_id: str) -> Sequence[Run]:
    """Runs of the experiment's stages, and older ones of it, that have not ended."""
    stages = select(Stage.run_id).where(Stage.experiment_id == experiment_id)
    mine = (Run.experiment_id == experiment_id) | Run.id.in_(stages)
    return session.scalars(select(Run).where(mine, Run.state.in_(LIVE)).order_by(Run.id)).all()


def requested_elsewhere(session: Session, run: Run) -> bool:
    """Whether an experiment is wanted for whose stage this run stands."""
    return session.scalars(_requesting(run)).first() is not None


def _requesting(run: Run) -> Select[Experiment]:
    standing = (Stage.experiment_id == Experiment.id) & (Stage.submission == Experiment.submission)
    return select(Experiment).join(Stage, standing).where(Stage.run_id == run.id, Experiment.requested)


def latest_run(session: Session, experiment: Experiment) -> str | None:
    """Id of the run that the last of its stages has which have one under the present wish."""
    mine = (Stage.experiment_id == experiment.id) & (Stage.submission == experiment.submission)
    return session.scalars(select(Stage.run_id).where(mine).order_by(Stage.position.desc())).first()


def next_stages(session: Session, run: Run) -> list[tuple[Experiment, str, bool]]:
    """What follows a run: for each experiment for whose last begun stage it stands, the stage after it, and
    whether that one is wanted."""
    found = []
    query = select(Experiment, Stage).join(Stage).where(Stage.run_id == run.id)
    for experiment, stage in session.execute(query.order_by(Experiment.used)):
        later = (Stage.experiment_id == experiment.id) & (Stage.position > stage.position)
        after = session.scalars(select(Stage).where(later).order_by(Stage.position)).first()
        if after is not None and (after.run_id is None or after.submission != experiment.submission):
            found.append(
                (experiment, after.name, experiment.requested and stage.submission == experiment.submission)
            )
    return found


def complete_submission(store: Store, experiment_id: str) -> None:
    """End the wish if every stage has succeeded under it."""
    with store.transaction() as session:
        experiment = session.get_one(Experiment, experiment_id)
        stages = session.scalars(select(Stage).where(Stage.experiment_id == experiment_id)).all()
        runs = [
            session.get(Run, stage.run_id) for stage in stages if stage.submission == experiment.submission
        ]
        if len(runs) == len(stages) and all(run and run.state == RunState.SUCCEEDED for run in runs):
            end_submission(session, experiment, "completed")


def experiments_to_advance(store: Store) -> Sequence[Experiment]:
    """Experiments that are wanted, and of which nothing is under way: their next stage may begin."""
    under_way = (
        select(Stage)
        .join(Run, Run.id == Stage.run_id)
        .where(
            Stage.experiment_id == Experiment.id,
            Stage.submission == Experiment.submission,
            Run.state.in_(LIVE),
        )
    )
    with store.snapshot() as session:
        query = select(Experiment).where(Experiment.requested, ~under_way.exists())
        return session.scalars(query.order_by(Experiment.used)).all()
