"""Remove an experiment from the database, then from the disk.

One transaction records which runs are removed and deletes their rows. Then their folders are renamed away and
deleted. After a kill in between, `perilune.control.evidence.stale_folders` removes the folders named in the
event.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from perilune.bundle.shared_files import SharedFiles
from perilune.control.evidence.disk import disk_bytes
from perilune.control.evidence.stale_folders import REMOVED_EVENT
from perilune.control.record.faults import kill_point
from perilune.control.record.home import Home
from perilune.control.record.store import (
    Attempt,
    Condition,
    Experiment,
    Machine,
    Operation,
    Run,
    Stage,
    record_event,
)
from perilune.control.record.transitions import Cleanup, MachineState, RunState
from perilune.control.runs.experiments import Control
from perilune.control.runs.submission import SUBMISSION_FILE
from perilune.errors import RequestError
from perilune.files import locked, read_json, write_json


@dataclass(frozen=True, slots=True)
class Removal:
    """The effects of removing an experiment.

    Attributes:
        kept: run that stays because another experiment needs it, to the id of that experiment.
        copied: names of other experiments that started from a checkpoint of a removed run. Their bundles
            contain links to it, or copies.
        blockers: reasons why it cannot be removed now, each with a command that helps.
    """

    experiment: Experiment
    runs: tuple[Run, ...]
    kept: dict[str, str]
    copied: tuple[str, ...]
    blockers: tuple[tuple[str, str], ...]


def plan_removal(control: Control, experiment_id: str) -> Removal:
    """Return the effects of removing the experiment now."""
    with control.store.snapshot() as session:
        return _plan_removal(session, control.home, experiment_id)


def removal_bytes(control: Control, removal: Removal) -> int:
    """Return the bytes on disk that the removal frees."""
    seen: set[tuple[int, int]] = set()
    folders = [control.home.run(run.id) for run in removal.runs]
    return sum(disk_bytes(path, seen) for path in (*folders, control.home.experiment(removal.experiment.id)))


def remove_experiment(control: Control, experiment_id: str) -> Removal:
    """Remove an experiment and its runs. Runs that other experiments need are handed over to those.

    Raises:
        RequestError: a run or a machine is live, or another command uses a run.
    """
    home = control.home
    with ExitStack() as stack:
        for run in plan_removal(control, experiment_id).runs:
            if home.run(run.id).is_dir() and not stack.enter_context(locked(home.run(run.id) / "lock")):
                raise RequestError("another command is using the run", where=run.id, remedy="try again later")
        with control.store.transaction() as session:
            removal = _plan_removal(session, home, experiment_id)
            if removal.blockers:
                what, remedy = removal.blockers[0]
                raise RequestError(what, where=removal.experiment.name, remedy=remedy)
            _delete_rows(session, removal)
        kill_point("remove.recorded")
        for run_id, heir in removal.kept.items():  # for `perilune rebuild`
            path = home.run(run_id) / SUBMISSION_FILE
            if path.exists():
                write_json(path, {**read_json(path), "experiment": heir})
        for run in removal.runs:
            home.discard(home.run(run.id))
        home.discard(home.experiment(experiment_id))
        SharedFiles(home.root).remove_unused()
    return removal


def _plan_removal(session: Session, home: Home, experiment_id: str) -> Removal:
    experiment = session.get(Experiment, experiment_id)
    if experiment is None:
        raise RequestError("the experiment has been removed already", where=experiment_id)
    own = list(session.scalars(select(Run).where(Run.experiment_id == experiment_id).order_by(Run.id)))
    kept = _find_kept_runs(session, experiment_id)
    runs = tuple(run for run in own if run.id not in kept)
    return Removal(
        experiment,
        runs,
        {run.id: kept[run.id] for run in own if run.id in kept},
        tuple(_find_dependents(session, home, experiment_id, runs)),
        tuple(_find_blockers(session, experiment, own)),
    )


def _find_kept_runs(session: Session, experiment_id: str) -> dict[str, str]:
    """Return the runs that another experiment needs, as a stage or as the origin of a retry, with its id."""
    others = select(Stage.run_id, Stage.experiment_id).where(
        Stage.experiment_id != experiment_id, Stage.run_id.is_not(None)
    )
    kept: dict[str, str] = {run_id: heir for run_id, heir in session.execute(others) if run_id}
    retries = select(Run.id, Run.experiment_id, Run.retry_of).where(Run.retry_of.is_not(None))
    # A retry is younger than the run it retries, and ids grow with time.
    for run_id, owner, before in session.execute(retries.order_by(Run.id.desc())):
        heir = kept.get(run_id) or (owner if owner != experiment_id else None)
        if heir and before:
            kept.setdefault(before, heir)
    return kept


def _find_dependents(session: Session, home: Home, experiment_id: str, runs: tuple[Run, ...]) -> list[str]:
    """Return the names of other experiments whose recipe starts from a checkpoint of one of the runs."""
    folders = [home.run(run.id) for run in runs]
    names = []
    for other in session.scalars(select(Experiment).where(Experiment.id != experiment_id)):
        path = home.experiment(other.id) / "recipe.json"
        recipe: dict[str, Any] = read_json(path) if path.exists() else {}
        weights = (recipe.get("model") or {}).get("path")
        if weights and any(Path(weights).is_relative_to(folder) for folder in folders):
            names.append(other.name)
    return sorted(names)


def _find_blockers(session: Session, experiment: Experiment, own: list[Run]) -> list[tuple[str, str]]:
    blockers = [
        (
            f"run {run.id} of stage {run.stage} is {run.state}",
            f"perilune cancel {run.id}, then wait for its end",
        )
        for run in own
        if not RunState(run.state).is_terminal
    ]
    if experiment.requested and not blockers:
        blockers.append(("its remaining stages are still to run", f"perilune cancel {experiment.id}"))
    ids = [run.id for run in own]
    pending = select(Attempt).where(Attempt.run_id.in_(ids), Attempt.cleanup == Cleanup.PENDING.value)
    blockers += [
        (f"attempt {row.number} of run {row.run_id} is not proven to have stopped", "perilune reconcile")
        for row in session.scalars(pending)
    ]
    alive = select(Machine).where(Machine.run_id.in_(ids), Machine.state != MachineState.GONE.value)
    blockers += [
        (f"machine {machine.key} of run {machine.run_id} is {machine.state}", "perilune machines list")
        for machine in session.scalars(alive)
    ]
    return blockers


def _delete_rows(session: Session, removal: Removal) -> None:
    ids = [run.id for run in removal.runs]
    experiment = removal.experiment
    record_event(
        session, REMOVED_EVENT, experiment=experiment.id, name=experiment.name, runs=ids, kept=removal.kept
    )
    for run_id, heir in removal.kept.items():
        session.execute(update(Run).where(Run.id == run_id).values(experiment_id=heir))
    session.execute(update(Run).where(Run.id.in_(ids)).values(retry_of=None))
    session.execute(delete(Stage).where(Stage.experiment_id == experiment.id))
    for table in (Operation, Attempt, Condition):
        session.execute(delete(table).where(table.run_id.in_(ids)))
    session.execute(delete(Run).where(Run.id.in_(ids)))
    session.execute(delete(Experiment).where(Experiment.id == experiment.id))
