"""Requests about existing runs: cancel, retry, read the log, collect the evidence."""

import codecs
import time
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy.orm import Session

from perilune.bundle.digest import recorded_digest
from perilune.bundle.freeze import copy_for_attempt
from perilune.bundle.storage import copy_file
from perilune.bundle.verify import verify
from perilune.control.evidence.attempt_evidence import worker_output
from perilune.control.evidence.attestation import removed_artifacts
from perilune.control.record.identity import require_own_run
from perilune.control.record.store import Attempt, Experiment, Run, record_event
from perilune.control.record.transitions import Reachability, RunState
from perilune.control.runs.current_submission import (
    end_submission,
    end_submissions_of,
    find_requesting,
    live_runs,
)
from perilune.control.runs.experiments import POLL_INTERVAL_S, Control
from perilune.control.runs.submission import Submission, submit_stage
from perilune.control.runs.templates import recorded_template, refresh_host_key
from perilune.errors import RequestError, WorkFailedError
from perilune.execution.log import LogReader, log_pieces

MAX_WORKER_LINES = 1000
CANCEL_TIMEOUT_S = 60.0  # seconds; longer than a task's grace period plus the proof that it has ended


def cancel_run(
    control: Control, run_id: str, *, force: bool = False, patience: float = CANCEL_TIMEOUT_S
) -> Run:
    """Stop a run: ask its task, wait, then kill it. Returns the run in its final state.

    The run becomes CANCELLED once it is proven that none of its processes is left; if it succeeds first, it
    stays SUCCEEDED. The request is recorded first, so the next command completes a killed `cancel_run`.

    With `force`, an attempt that is unreachable, or whose processes cannot be ended, is abandoned: the run
    becomes CANCELLED, results of that attempt are rejected, and it is stopped once it is reachable again.

    Raises:
        RequestError: the run has already ended.
        WorkFailedError: it is unreachable, or was not proven to have stopped within `patience` seconds.
    """
    request_cancel(control, run_id, force=force)
    return _await_stop(control, run_id, force=force, patience=patience)


def _await_stop(control: Control, run_id: str, *, force: bool, patience: float) -> Run:
    control.reconciler.reset_backoff(run_id)
    deadline = time.monotonic() + patience
    while not RunState((run := control.reconciler.reconcile(run_id)).state).is_terminal:
        if not force and _is_unreachable(control, run):
            raise WorkFailedError(
                "cancellation is requested, but the worker of the run is unreachable from here",
                where=f"run {run_id}",
                remedy=f"perilune reconcile on its machine; without proof: perilune cancel {run_id} --force",
            )
        if time.monotonic() > deadline:
            raise WorkFailedError(
                "cancellation is requested, but the run is not yet proven to have stopped",
                where=f"run {run_id}",
                remedy="perilune reconcile tries again",
            )
        time.sleep(POLL_INTERVAL_S)
    return run


def _is_unreachable(control: Control, run: Run) -> bool:
    with control.store.snapshot() as session:
        attempt = session.get(Attempt, (run.id, run.current_epoch))
    return attempt is not None and attempt.reachability == Reachability.UNREACHABLE


def request_cancel(control: Control, run_id: str, *, force: bool = False) -> None:
    """Request that a run stops (with `force`, without proof) and that no stage follows it.

    The next reconcile stops it.

    Raises:
        RequestError: the run has already ended.
    """
    require_own_run(control.home, run_id)
    with control.store.transaction() as session:
        run = session.get_one(Run, run_id)
        if RunState(run.state).is_terminal:
            verb = "been cancelled" if run.state == RunState.CANCELLED else run.state
            raise RequestError(f"the run has already {verb}", where=f"run {run_id}")
        _record_request(session, run, force=force)
        end_submissions_of(session, run, "cancelled")


def _record_request(session: Session, run: Run, *, force: bool) -> None:
    if run.desired != RunState.CANCELLED:
        run.desired = RunState.CANCELLED.value
        record_event(session, "run.cancel_requested", run_id=run.id, epoch=run.current_epoch)
    if force and not run.forced:
        run.forced = True
        record_event(session, "run.cancel_forced", run_id=run.id, epoch=run.current_epoch)


def cancel_experiment(control: Control, experiment_id: str, *, force: bool = False) -> list[Run]:
    """Stop the live runs of an experiment, and start no further stage.

    A run that another experiment needs too continues.

    Returns:
        The stopped runs in their final states; empty between two stages.

    Raises:
        RequestError: no run of the experiment is live, and no stage would start.
        WorkFailedError: as `cancel_run`.
    """
    stopping = request_experiment_cancel(control, experiment_id, force=force)
    return [_await_stop(control, run, force=force, patience=CANCEL_TIMEOUT_S) for run in stopping]


def request_experiment_cancel(
    control: Control, experiment_id: str, *, only: str | None = None, force: bool = False
) -> list[str]:
    """Request that an experiment stops: its live runs (with `force`, without proof), and all later stages.

    The next reconcile stops the runs. A run that another experiment needs too continues.

    Args:
        only: id of the only run to stop.

    Returns:
        The ids of the runs that stop.

    Raises:
        RequestError: no run of the experiment is live, and no stage would start.
    """
    with control.store.transaction() as session:
        experiment = session.get_one(Experiment, experiment_id)
        runs = live_runs(session, experiment_id)
        for run in runs:
            require_own_run(control.home, run.id)
        if not runs and not experiment.requested:
            raise RequestError(
                "the experiment is not running",
                where=f"experiment {experiment.name}",
                remedy=f"perilune runs {experiment_id}",
            )
        end_submission(session, experiment, "cancelled")
        stopping = [run for run in runs if only in {None, run.id} and not find_requesting(session, run.id)]
        for run in stopping:
            _record_request(session, run, force=force)
        return [run.id for run in stopping]


def retry_run(control: Control, run_id: str) -> Run:
    """Submit the same bundle as a new run, which is linked to this one and starts from its last checkpoint.

    The new run has the same template, with the host key that the user's templates now contain for the
    machine.

    Raises:
        RequestError: the run is live or has succeeded.
    """
    run = control.run(run_id)
    if run.state == RunState.SUCCEEDED:
        raise RequestError(
            "the run has succeeded", where=f"run {run_id}", remedy=f"perilune reproduce {run_id}"
        )
    if not RunState(run.state).is_terminal:
        raise RequestError(
            f"the run is {run.state}", where=f"run {run_id}", remedy=f"perilune cancel {run_id}, then retry"
        )
    template = recorded_template(control.home, run_id)
    if template is not None:
        template = refresh_host_key(control.home, template)
    submission = Submission(run.experiment_id, run.stage, run.task, retry_of=run_id, template=template)

    def copy(destination: Path) -> str:
        copy_for_attempt(control.home.bundle(run_id), destination)
        return recorded_digest(destination)

    return submit_stage(control.home, control.store, submission, copy, control.is_intact)


def stream_log(control: Control, run_id: str, *, follow: bool = False) -> Iterator[str]:
    """Yield the text of a run's log, attempt by attempt; with `follow`, as it grows, until the run ends.

    The text is raw: pass it through `perilune.terminal.escape_control` before showing it.
    """
    if follow:
        require_own_run(control.home, run_id)
    attempt = 1
    while True:
        runtime = control.home.attempt(run_id, attempt) / "runtime"
        printed, decoder = LogReader(runtime), codecs.getincrementaldecoder("utf-8")(errors="replace")
        while True:
            # Before the log is read: if the run has ended, the log is complete.
            run = control.reconciler.reconcile(run_id, act=False)
            for data in printed.read():
                yield decoder.decode(data)
            over = RunState(run.state).is_terminal or run.current_epoch > attempt
            if over or not follow:
                break
            time.sleep(POLL_INTERVAL_S)
        if not log_pieces(runtime) and (output := worker_output(runtime.parent, MAX_WORKER_LINES)):
            yield f"{output}\n"  # the task never started
        if run.current_epoch <= attempt:
            return
        attempt += 1
        yield f"--- attempt {attempt} ---\n"


def collect_evidence(control: Control, run_id: str, destination: Path | None = None) -> list[Path]:
    """Check that a run's evidence is intact, and copy it to `destination` if that is given.

    Returns:
        The files of the attempt, relative to its directory.

    Raises:
        RequestError: there is nothing to collect yet, or `destination` exists.
        WorkFailedError: a file differs from the manifest; the message names the first.
    """
    run = control.run(run_id)
    attempt = control.directory(run)
    if run.current_epoch == 0 or not RunState(run.state).is_terminal:
        raise RequestError(
            f"the run is {run.state}; its evidence is not complete yet",
            where=f"run {run_id}",
            remedy=f"perilune logs {run_id} -f",
        )
    removed = removed_artifacts(control.home, run_id, run.current_epoch)
    differences = verify(attempt, run.bundle_digest, removed)
    if differences:
        what, remedy = f"the evidence is damaged: {differences[0]}", f"perilune verify {run_id}"
        raise WorkFailedError(what, where=str(attempt), remedy=remedy)
    files = sorted(path.relative_to(attempt) for path in attempt.rglob("*") if path.is_file())
    if destination is not None:
        with control.home.new_folder("copy the evidence", destination) as building:
            for file in files:
                copy_file(attempt / file, building / file, (attempt / file).stat().st_mode & 0o777)
    return files
