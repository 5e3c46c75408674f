"""The current submission of an experiment: which runs its stages have, and whether later stages are to start.

A submission is recorded in the transaction that accepts its first run. It ends in the transaction that
records the failure of a stage, a request to cancel, or the success of all stages. Until then any process may
start the next stage, and afterwards none may. A stage gets at most one run per submission, whichever process
asks.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from perilune.control.record.store import Experiment, Run, Stage, Store, record_event
from perilune.control.record.transitions import RunState
from perilune.control.runs.templates import Template
from perilune.errors import WorkFailedError

BLOCKED_EVENT = "experiment.blocked"  # event: the next stage could not be started
LIVE_STATES = (RunState.QUEUED.value, RunState.ACTIVE.value)


class ExperimentCancelledError(WorkFailedError):
    """The experiment was cancelled while none of its runs was live."""


def open_submission(session: Session, experiment_id: str, template: Template | None) -> None:
    """Record that a user submits the experiment, from its first stage, with this template."""
    experiment = session.get_one(Experiment, experiment_id)
    experiment.submission += 1
    experiment.requested = True
    experiment.template = None if template is None else template.model_dump(mode="json")
    record_event(session, "experiment.submitted", experiment=experiment_id, submission=experiment.submission)


def find_run_of_stage(session: Session, experiment_id: str, stage: str) -> Run | None:
    """Return the run that a stage has in the current submission; None if it has none yet.

    Raises:
        ExperimentCancelledError: the stage has no run, and the submission has ended.
    """
    experiment = session.get_one(Experiment, experiment_id)
    current = (Stage.experiment_id == experiment_id) & (Stage.submission == experiment.submission)
    query = select(Run).join(Stage, Stage.run_id == Run.id).where(current, Stage.name == stage)
    run = session.scalars(query).one_or_none()
    if run is None and not experiment.requested:
        raise ExperimentCancelledError(
            "the experiment was cancelled", where=f"stage {stage}", remedy="run the same command to continue"
        )
    return run


def find_requesting(session: Session, run_id: str) -> list[tuple[Experiment, Stage]]:
    """Return the experiments whose current submission has this run for a stage, and that stage."""
    current = (Stage.experiment_id == Experiment.id) & (Stage.submission == Experiment.submission)
    query = select(Experiment, Stage).join(Stage, current).where(Stage.run_id == run_id, Experiment.requested)
    return [(experiment, stage) for experiment, stage in session.execute(query)]


def end_submissions_of(session: Session, run: Run, reason: str) -> None:
    """End the current submissions of all experiments that have this run for a stage."""
    for experiment, _ in find_requesting(session, run.id):
        end_submission(session, experiment, reason, run)


def end_submission(session: Session, experiment: Experiment, reason: str, run: Run | None = None) -> None:
    """End the current submission of an experiment: no further stage starts."""
    if experiment.requested:
        experiment.requested = False
        cause: dict[str, Any] = {} if run is None else {"by": run.id}
        record_event(session, f"experiment.{reason}", experiment=experiment.id, **cause)


def live_runs(session: Session, experiment_id: str) -> Sequence[Run]:
    """Return the live runs of the experiment, including those of its older submissions."""
    stages = select(Stage.run_id).where(Stage.experiment_id == experiment_id)
    own = (Run.experiment_id == experiment_id) | Run.id.in_(stages)
    return session.scalars(select(Run).where(own, Run.state.in_(LIVE_STATES)).order_by(Run.id)).all()


def latest_run(session: Session, experiment: Experiment) -> str | None:
    """Return the id of the run of the latest stage that has one in the current submission."""
    current = (Stage.experiment_id == experiment.id) & (Stage.submission == experiment.submission)
    return session.scalars(select(Stage.run_id).where(current).order_by(Stage.position.desc())).first()


def next_stages(session: Session, run: Run) -> list[tuple[Experiment, str, bool]]:
    """Return the stage after this run in each experiment whose latest run it is, and whether it starts."""
    result = []
    query = select(Experiment, Stage).join(Stage).where(Stage.run_id == run.id)
    for experiment, stage in session.execute(query.order_by(Experiment.used)):
        later = (Stage.experiment_id == experiment.id) & (Stage.position > stage.position)
        after = session.scalars(select(Stage).where(later).order_by(Stage.position)).first()
        if after is not None and (after.run_id is None or after.submission != experiment.submission):
            starts = experiment.requested and stage.submission == experiment.submission
            result.append((experiment, after.name, starts))
    return result


def complete_submission(store: Store, experiment_id: str) -> None:
    with store.transaction() as session:
        experiment = session.get_one(Experiment, experiment_id)
        stages = session.scalars(select(Stage).where(Stage.experiment_id == experiment_id)).all()
        current = [stage for stage in stages if stage.submission == experiment.submission]
        runs = [session.get(Run, stage.run_id) for stage in current]
        if len(runs) == len(stages) and all(run and run.state == RunState.SUCCEEDED for run in runs):
            end_submission(session, experiment, "completed")


def experiments_to_advance(store: Store) -> Sequence[Experiment]:
    """Return the requested experiments without a live run: their next stage may start."""
    current = (Stage.experiment_id == Experiment.id) & (Stage.submission == Experiment.submission)
    live = select(Stage).join(Run, Run.id == Stage.run_id).where(current, Run.state.in_(LIVE_STATES))
    query = select(Experiment).where(Experiment.requested, ~live.exists())
    return store.read(query.order_by(Experiment.used))
