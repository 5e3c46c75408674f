"""Submit a stage as a run: freeze its bundle, then record the run under an idempotency key.

The key is made of experiment, stage, digest and number of earlier runs, so that two commands that submit the
same stage at once get one run.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from perilune.bundle.shared_files import SharedFiles
from perilune.bundle.storage import storage_errors
from perilune.control.evidence.attestation import attest_bundle
from perilune.control.record.faults import kill_point
from perilune.control.record.home import Home
from perilune.control.record.identity import read_inherited
from perilune.control.record.ids import new_ulid
from perilune.control.record.store import Experiment, Run, Stage, Store, record_event
from perilune.control.record.transitions import RunState
from perilune.control.runs.current_submission import LIVE_STATES, find_run_of_stage, open_submission
from perilune.control.runs.templates import TEMPLATE_FILE, Template
from perilune.files import fsync_directory, write_json

SUBMISSION_FILE = "submission.json"  # in a run's directory; `perilune rebuild` reads it


@dataclass(frozen=True, slots=True)
class Submission:
    """A request to run a stage of an experiment.

    Attributes:
        retry_of: the run that this one retries.
        template: where and how the run executes; recorded with it. None is this machine.
        part: "first" submits the whole experiment from this stage; "later" continues the current submission;
            "alone" submits only this run.
    """

    experiment_id: str
    stage: str
    task: str
    retry_of: str | None = None
    template: Template | None = None
    part: Literal["alone", "first", "later"] = "alone"


def submit_stage(
    home: Home,
    store: Store,
    submission: Submission,
    freeze: Callable[[Path], str],
    is_reusable: Callable[[Run], bool] = lambda run: False,
) -> Run:
    """Get a run for a submission: a succeeded or live run with the same bundle, or else a new one.

    The bundle is durable before the run is recorded. A kill before the run is recorded leaves a directory
    that the next reconcile removes; a kill afterwards leaves an accepted run.

    Args:
        freeze: makes the bundle at the given path and returns its digest.
        is_reusable: whether the evidence of a succeeded run is still intact.

    Raises:
        RequestError: freezing failed.
        ExperimentCancelledError: the experiment was cancelled before this later stage.
    """
    with home.scratch() as scratch:
        digest = freeze(scratch / "bundle")
        SharedFiles(home.root).share(scratch / "bundle")
        kill_point("submit.frozen")
        run_id = new_ulid()
        attest_bundle(home, scratch, run_id)
        origin = {"experiment": submission.experiment_id, "retry_of": submission.retry_of}
        write_json(scratch / SUBMISSION_FILE, origin)
        if submission.template is not None:
            write_json(scratch / TEMPLATE_FILE, submission.template.model_dump(mode="json"))
        with storage_errors("keep the bundle", home.runs):
            scratch.rename(home.run(run_id))
            fsync_directory(home.runs)
        kill_point("submit.published")
        try:
            with store.transaction() as session:
                run = _find_or_add_run(session, home, submission, digest, is_reusable, run_id=run_id)
        except BaseException:
            home.run(run_id).rename(scratch)  # removed at the end of the block
            raise
        kill_point("submit.accepted")
        if run.id != run_id:
            home.run(run_id).rename(scratch)
        return run


def _find_or_add_run(
    session: Session,
    home: Home,
    submission: Submission,
    digest: str,
    is_reusable: Callable[[Run], bool],
    *,
    run_id: str,
) -> Run:
    experiment_id, stage = submission.experiment_id, submission.stage
    if submission.part == "first":
        open_submission(session, experiment_id, submission.template)
    if submission.part == "later" and (current := find_run_of_stage(session, experiment_id, stage)):
        return current
    run = find_reusable_run(session, home, digest, is_reusable)
    run = run or _add_run(session, submission, digest, run_id)
    _link_stage(session, submission, run.id)
    return run


def find_reusable_run(
    session: Session, home: Home, digest: str, is_reusable: Callable[[Run], bool]
) -> Run | None:
    """Return a live or reusable run of this home whose bundle has this digest."""
    others = read_inherited(home).runs
    same = list(session.scalars(select(Run).where(Run.bundle_digest == digest).order_by(Run.id.desc())))
    for run in same:
        if run.state in LIVE_STATES and run.desired != RunState.CANCELLED and run.id not in others:
            return run
    return next((run for run in same if run.state == RunState.SUCCEEDED and is_reusable(run)), None)


def _add_run(session: Session, submission: Submission, digest: str, run_id: str) -> Run:
    experiment_id, stage = submission.experiment_id, submission.stage
    same = (Run.bundle_digest == digest, Run.experiment_id == experiment_id, Run.stage == stage)
    before = list(session.scalars(select(Run).where(*same).order_by(Run.id)))
    run = Run(
        id=run_id,
        submit_key=f"{experiment_id}/{stage}/{digest}/{len(before)}",
        experiment_id=experiment_id,
        stage=stage,
        task=submission.task,
        bundle_digest=digest,
        retry_of=submission.retry_of or (before[-1].id if before else None),
        created=time.time(),
    )
    session.add(run)
    session.flush()
    record_event(session, "run.queued", run_id=run_id, stage=stage, digest=digest, key=run.submit_key)
    return run


def _link_stage(session: Session, submission: Submission, run_id: str) -> None:
    experiment_id, name = submission.experiment_id, submission.stage
    query = select(Stage).where(Stage.experiment_id == experiment_id, Stage.name == name)
    stage = session.scalars(query).one()
    if submission.part != "alone":
        stage.submission = session.get_one(Experiment, experiment_id).submission
    if stage.run_id != run_id:
        stage.run_id = run_id
        record_event(session, "stage.linked", run_id=run_id, experiment=experiment_id, stage=name)
