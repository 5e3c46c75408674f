"""From a job to an accepted run: frozen first, then recorded in one transaction, under an idempotency key."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from perilune.bundle.storage import storage_errors
from perilune.control.evidence.attestation import attest_bundle
from perilune.control.record.faults import reached
from perilune.control.record.home import Home
from perilune.control.record.identity import inherited
from perilune.control.record.ids import new_ulid
from perilune.control.record.store import Experiment, Run, Stage, Store, record
from perilune.control.record.transitions import RunState
from perilune.control.runs.current_submission import open_submission, run_of_stage
from perilune.control.runs.reconcile import LIVE_RUNS
from perilune.control.runs.templates import TEMPLATE, Template
from perilune.control.runs.wheels import share_wheel
from perilune.errors import RequestError
from perilune.files import fsync_directory, write_json

SUBMISSION = (
    "submission.json"  # in a run's directory: what the bundle does not say, to rebuild the record from
)


@dataclass(frozen=True, slots=True)
class Submission:
    """What a submission asks for: a stage of an experiment, and optionally the run it repeats.

    Attributes:
        key: idempotency key; None takes one made of experiment, stage, digest and how often that was
            tried, so that two commands asking for the same thing at once get one run.
        template: where and how it is to go; recorded with the run. None is this machine.
        part: "first" asks for the whole experiment, beginning with this stage; "later" goes on with what was
            asked for; "alone" asks for this run and nothing else.
    """

    experiment_id: str
    stage: str
    task: str
    key: str | None = None
    retry_of: str | None = None
    template: Template | None = None
    part: Literal["alone", "first", "later"] = "alone"


def submit(
    home: Home,
    store: Store,
    submission: Submission,
    freeze: Callable[[Path], str],
    reusable: Callable[[Run], bool] = lambda run: False,
) -> Run:
    """Get the run that fulfils a wish: one that has succeeded or is under way with the same bundle, else new.

    The bundle lies durable in its place before the run is recorded. A kill before that leaves a directory
    that the next reconcile removes; a kill after it leaves an accepted run.

    Args:
        freeze: makes the bundle at the path it is given and returns its digest.
        reusable: whether a succeeded run's evidence still is whole.

    Raises:
        RequestError: the key has been used for another bundle, or freezing failed.
        NotWantedError: a later stage of an experiment that is not wanted any more.
    """
    with home.scratch() as scratch:
        digest = freeze(scratch / "bundle")
        share_wheel(home, scratch / "bundle")
        reached("submit.frozen")
        run_id = new_ulid()
        attest_bundle(home, scratch, run_id)
        told = {
            "experiment": submission.experiment_id,
            "key": submission.key,
            "retry_of": submission.retry_of,
        }
        write_json(scratch / SUBMISSION, told)
        if submission.template is not None:
            write_json(scratch / TEMPLATE, submission.template.model_dump(mode="json"))
        with storage_errors("keep the bundle", home.runs):
            scratch.rename(home.run(run_id))
            fsync_directory(home.runs)
        reached("submit.published")
        try:
            with store.transaction() as session:
                run = _find_or_accept(session, home, submission, digest, reusable, run_id=run_id)
        except BaseException:
            home.run(run_id).rename(scratch)  # is removed with the block
            raise
        reached("submit.accepted")
        if run.id != run_id:
            home.run(run_id).rename(scratch)
        return run


def _find_or_accept(
    session: Session,
    home: Home,
    submission: Submission,
    digest: str,
    reusable: Callable[[Run], bool],
    *,
    run_id: str,
) -> Run:
    if submission.part == "first":
        open_submission(session, submission.experiment_id, submission.template)
    if submission.part == "later" and (
        standing := run_of_stage(session, submission.experiment_id, submission.stage)
    ):
        return standing
    run = _existing(session, home, submission, digest, reusable) or _accept(
        session, submission, digest, run_id
    )
    _link(session, submission, run.id)
    return run


def _existing(
    session: Session, home: Home, submission: Submission, digest: str, reusable: Callable[[Run], bool]
) -> Run | None:
    if submission.key is not None:
        run = session.scalars(select(Run).where(Run.submit_key == submission.key)).one_or_none()
        if run is not None and run.bundle_digest != digest:
            raise RequestError(
                f"the key '{submission.key}' was used for another bundle (run {run.id})",
                where=f"stage {submission.stage}",
                remedy="use a new key, or submit exactly what was submitted before",
            )
        return run
    return same_work(session, home, digest, reusable)


def same_work(session: Session, home: Home, digest: str, reusable: Callable[[Run], bool]) -> Run | None:
    """The run of this home that does, or has done, what a bundle of that digest asks for."""
    others = inherited(home).runs
    same = list(session.scalars(select(Run).where(Run.bundle_digest == digest).order_by(Run.id.desc())))
    for run in same:
        if run.state in LIVE_RUNS and run.desired != RunState.CANCELLED and run.id not in others:
            return run
    return next((run for run in same if run.state == RunState.SUCCEEDED and reusable(run)), None)


def _accept(session: Session, submission: Submission, digest: str, run_id: str) -> Run:
    mine = select(Run).where(Run.bundle_digest == digest, Run.experiment_id == submission.experiment_id)
    before = list(session.scalars(mine.where(Run.stage == submission.stage).order_by(Run.id)))
    run = Run(
        id=run_id,
        submit_key=submission.key or f"{submission.experiment_id}/{submission.stage}/{digest}/{len(before)}",
        experiment_id=submission.experiment_id,
        stage=submission.stage,
        task=submission.task,
        bundle_digest=digest,
        retry_of=submission.retry_of or (before[-1].id if before else None),
        created=time.time(),
    )
    session.add(run)
    session.flush()
    record(session, "run.queued", run_id=run_id, stage=submission.stage, digest=digest, key=run.submit_key)
    return run


def _link(session: Session, submission: Submission, run_id: str) -> None:
    """From now on `run_id` stands for the stage of the experiment."""
    query = select(Stage).where(
        Stage.experiment_id == submission.experiment_id, Stage.name == submission.stage
    )
    stage = session.scalars(query).one()
    if submission.part != "alone":
        stage.submission = session.get_one(Experiment, submission.experiment_id).submission
    if stage.run_id != run_id:
        stage.run_id = run_id
        record(
            session,
            "stage.linked",
            run_id=run_id,
            experiment=submission.experiment_id,
            stage=submission.stage,
        )
