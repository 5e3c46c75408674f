"""Recreate a lost or damaged database from the folders of the home.

Recipes, bundles, templates, attempts and signed statements are files, and show which runs there were and how
they ended. Everything that only the database knew is lost: events, requests to cancel, the remaining stages
of experiments, and the cost of machines. Machines that are still rented are found by their tag and
terminated.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from perilune.bundle.digest import recorded_digest
from perilune.bundle.envelope import PUBLIC, verify_statement
from perilune.control.evidence.attempt_evidence import find_evidence_problem
from perilune.control.evidence.attestation import evidence_paths, removed_artifacts
from perilune.control.evidence.verification import find_damage, find_unrecorded_runs
from perilune.control.record.database import URL_VARIABLE
from perilune.control.record.home import Home, has_daemon
from perilune.control.record.ids import new_ulid, ulid_seconds
from perilune.control.record.store import Attempt, Experiment, Run, Stage, Store, record_event
from perilune.control.record.transitions import AttemptState, Cleanup, RunState
from perilune.control.runs.submission import SUBMISSION_FILE
from perilune.control.runs.templates import RentedTarget, Template, recorded_template
from perilune.errors import PeriluneError, RequestError, WorkFailedError
from perilune.execution.verdict import Cause, Verdict, read_verdict
from perilune.files import canonical_json, fsync_directory, read_json, sha256_bytes

REBUILT_MESSAGE = "the database was rebuilt; how this attempt ended is unknown"


@dataclass
class RebuildReport:
    """The result of a rebuild.

    Attributes:
        runs: number of runs by state.
        skipped: what could not be read, one sentence each.
        aside: the damaged database under its new name; None if there was none.
    """

    runs: Counter[str] = field(default_factory=Counter)
    skipped: list[str] = field(default_factory=list)
    aside: Path | None = None


def rebuild(home: Home) -> RebuildReport:
    """Build a new database next to the old one, then replace it and keep the old one under another name.

    Raises:
        RequestError: the database is intact or in PostgreSQL, or a daemon is running.
    """
    _require_damage(home)
    report = RebuildReport()
    with home.scratch() as scratch:
        store = Store(Home(scratch))
        with store.transaction() as session:
            _add_experiments(home, session, report)
            for path in sorted(home.runs.iterdir()):
                try:
                    state = _add_run(home, session, path.name)
                    report.runs[state] += 1
                except (PeriluneError, KeyError, TypeError, ValueError) as error:
                    report.skipped.append(f"run {path.name}: {error}")
            record_event(session, "store.rebuilt", runs=dict(report.runs), skipped=report.skipped)
        store.close()
        with (scratch / home.database.name).open("rb") as file:
            os.fsync(file.fileno())
        report.aside = _set_aside(home)
        (scratch / home.database.name).rename(home.database)
        fsync_directory(home.root)
    return report


def _require_damage(home: Home) -> None:
    if (home.root / "database").exists() or os.environ.get(URL_VARIABLE):
        remedy = "restore the server's own backup, or: PERILUNE_HOME=NEW perilune restore"
        raise RequestError("the database is in PostgreSQL", where=str(home.root), remedy=remedy)
    if has_daemon(home):
        raise RequestError("a daemon manages this home", where=str(home.root), remedy="stop it first")
    try:
        store = Store(home)
        whole = not find_damage(store) and not find_unrecorded_runs(home, store)
        store.close()
    except WorkFailedError:  # the database cannot even be opened
        return
    if whole:
        raise RequestError("the database is intact", where=str(home.database), remedy="perilune verify")


def _set_aside(home: Home) -> Path | None:
    aside = home.database.with_name(f"state.damaged-{new_ulid()}.db")
    for end in ("-shm", "-wal", ""):
        with contextlib.suppress(FileNotFoundError):
            Path(f"{home.database}{end}").rename(f"{aside}{end}")
    return aside if aside.exists() else None


def _add_experiments(home: Home, session: Session, report: RebuildReport) -> None:
    digests: set[str] = set()
    # The newest first: an older folder with the same recipe was left by a command that was killed.
    for path in sorted(home.experiments.iterdir(), reverse=True):
        try:
            document = read_json(path / "recipe.json")
            stages = [
                (str(item.get("name", item.get("stage"))), str(item["task"])) for item in document["stages"]
            ]
            digest, began = sha256_bytes(canonical_json(document)), ulid_seconds(path.name)
            row = Experiment(
                id=path.name, name=str(document["name"]), recipe_digest=digest, created=began, used=began
            )
        except (PeriluneError, KeyError, TypeError, AttributeError, ValueError) as error:
            report.skipped.append(f"experiment {path.name}: {error}")
            continue
        if digest in digests:
            report.skipped.append(f"experiment {path.name}: a newer one has the same recipe")
            continue
        digests.add(digest)
        session.add(row)
        session.flush()
        for position, (name, task) in enumerate(stages):
            session.add(Stage(experiment_id=path.name, position=position, name=name, task=task))
        session.flush()


def _add_run(home: Home, session: Session, run_id: str) -> RunState:
    """Add a run with its attempts, as far as its folder shows them; returns its state."""
    job = read_json(home.bundle(run_id) / "job.json")
    digest = recorded_digest(home.bundle(run_id))
    path = home.run(run_id) / SUBMISSION_FILE
    submission: Mapping[str, Any] = read_json(path) if path.exists() else {}
    experiment = _find_experiment(session, submission, job, run_id)
    same_job = (Run.experiment_id == experiment.id, Run.stage == job["stage"], Run.bundle_digest == digest)
    before = session.query(Run).filter(*same_job).order_by(Run.id).all()
    run = Run(
        id=run_id,
        submit_key=f"{experiment.id}/{job['stage']}/{digest}/{len(before)}",
        experiment_id=experiment.id,
        stage=job["stage"],
        task=job["task"],
        bundle_digest=digest,
        current_epoch=home.newest_attempt(run_id),
        created=ulid_seconds(run_id),
    )
    retried = submission.get("retry_of") or (before[-1].id if before else None)
    run.retry_of = retried if retried and session.get(Run, retried) else None
    attempts = list(_rebuild_attempts(home, run, recorded_template(home, run_id)))
    _set_outcome(run, attempts[-1] if attempts else None)
    session.add(run)
    session.flush()
    session.add_all(attempts)
    stages = session.query(Stage).filter_by(experiment_id=experiment.id)
    if not stages.filter_by(name=run.stage).update({"run_id": run_id}):
        location = {"experiment_id": experiment.id, "position": stages.count()}
        session.add(Stage(name=run.stage, task=run.task, run_id=run_id, **location))
    experiment.used = max(experiment.used, run.created)
    record_event(session, "run.rebuilt", run_id=run_id, epoch=run.current_epoch, state=run.state)
    return RunState(run.state)


def _find_experiment(
    session: Session, submission: Mapping[str, Any], job: Mapping[str, Any], run_id: str
) -> Experiment:
    """Return the experiment that a run was submitted for, or the latest older one that has its stage."""
    experiment = session.get(Experiment, submission.get("experiment", ""))
    stages = session.query(Stage).filter_by(name=job["stage"], task=job["task"])
    earlier = stages.filter(Stage.experiment_id < run_id).order_by(Stage.experiment_id.desc()).first()
    if experiment is None and earlier is not None:
        experiment = session.get_one(Experiment, earlier.experiment_id)
    if experiment is None:
        experiment = session.query(Experiment).filter_by(recipe_digest="").one_or_none()
    if experiment is None:
        began = ulid_seconds(run_id)
        experiment = Experiment(id=new_ulid(), name="recovered", recipe_digest="", created=began, used=began)
        session.add(experiment)
        session.flush()
    return experiment


def _rebuild_attempts(home: Home, run: Run, template: Template | None) -> Iterator[Attempt]:
    numbers = home.attempt_numbers(run.id)
    for number in numbers:
        placement = "local" if template is None else template.placement.name
        launcher = "process" if template is None or template.container is None else template.container.name
        attempt = Attempt(
            run_id=run.id,
            number=number,
            placement=placement,
            launcher=launcher,
            created=home.attempt(run.id, number).stat().st_mtime,
        )
        verdict = _read_verdict(home, run.id, number)
        if verdict is not None:
            _fill_outcome(attempt, verdict, _is_committed(home, run, number, verdict))
        elif number == numbers[-1] and not (template and isinstance(template.placement, RentedTarget)):
            attempt.state = AttemptState.RUNNING.value  # the next observation will decide
        else:
            attempt.state, attempt.cleanup = AttemptState.LOST.value, Cleanup.PENDING.value
            attempt.cause, attempt.message = Cause.UNREACHABLE.value, REBUILT_MESSAGE
            attempt.ended = time.time()
        yield attempt


def _read_verdict(home: Home, run_id: str, number: int) -> Verdict | None:
    try:
        return read_verdict(home.attempt(run_id, number) / "runtime", number)
    except PeriluneError:  # damaged: nothing is known
        return None


def _is_committed(home: Home, run: Run, number: int, verdict: Verdict) -> bool:
    """Return whether the result was accepted: it is signed and its evidence is intact."""
    statement = evidence_paths(home, run.id, number).result
    if not verdict.succeeded or not statement.exists():
        return False
    try:
        verify_statement(statement, home.keys / PUBLIC)
        return not find_evidence_problem(
            home.attempt(run.id, number), verdict, removed_artifacts(home, run.id, number)
        )
    except PeriluneError:
        return False


def _fill_outcome(attempt: Attempt, verdict: Verdict, committed: bool) -> None:
    """Fill in an attempt that has a verdict. A success that was not accepted is examined again."""
    attempt.exit_code, attempt.signal = verdict.exit_code, verdict.signal
    if verdict.succeeded and not committed:
        attempt.state = AttemptState.RUNNING.value
        return
    stopped = AttemptState.CANCELLED if verdict.cause == Cause.STOPPED else AttemptState.FAILED
    attempt.state = (AttemptState.SUCCEEDED if committed else stopped).value
    attempt.manifest_digest = verdict.manifest_digest
    attempt.cause, attempt.message = verdict.cause, verdict.message
    attempt.ended, attempt.cleanup = attempt.created + verdict.seconds, Cleanup.DONE.value


def _set_outcome(run: Run, last: Attempt | None) -> None:
    states = {
        AttemptState.SUCCEEDED: RunState.SUCCEEDED,
        AttemptState.RUNNING: RunState.ACTIVE,
        AttemptState.FAILED: RunState.FAILED,
        AttemptState.LOST: RunState.FAILED,
    }
    state = RunState.CANCELLED if last is None else states.get(AttemptState(last.state), RunState.CANCELLED)
    run.state = state.value
    if state.is_terminal:
        run.ended = run.created if last is None else last.ended
    if last is None:
        run.message = "the database was rebuilt; no attempt had started"
    elif state is RunState.SUCCEEDED:
        run.manifest_digest = last.manifest_digest
    elif state.is_terminal:
        run.cause, run.message = last.cause, last.message
