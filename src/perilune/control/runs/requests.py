"""What a user may ask of a run besides running it: its log, to stop, to be tried again, to be handed over."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from perilune.bundle.digest import recorded_digest
from perilune.bundle.freeze import attempt_copy
from perilune.bundle.storage import new_folder, place
from perilune.bundle.verify import verify
from perilune.control.evidence.attempt_evidence import worker_output
from perilune.control.evidence.attestation import removed_from
from perilune.control.record.identity import require_own_run
from perilune.control.record.store import Attempt, Experiment, Run, record
from perilune.control.record.transitions import Reachability, RunState
from perilune.control.runs.current_submission import (
    end_submission,
    end_submissions_of,
    requested_elsewhere,
    runs_under_way,
)
from perilune.control.runs.experiments import POLL_SECONDS, Control
from perilune.control.runs.submission import Submission, submit
from perilune.control.runs.templates import recorded_template, with_present_host_key
from perilune.errors import RequestError, WorkFailedError
from perilune.execution.log import LogReader, log_pieces

WORKER_LINES = 1000
CANCEL_PATIENCE = 60.0  # seconds; longer than a task's grace and the proof that it has ended


def cancel(control: Control, run_id: str, *, force: bool = False, patience: float = CANCEL_PATIENCE) -> Run:
    """Stop a run: ask its task, wait, then kill. Returns it in its last state.

    It is CANCELLED only when it is proven that none of its processes is left; when it succeeds first,
    success wins. The wish is durable before anything is done, so a killed `cancel` is carried out by
    whatever command comes next.

    With `force`, an attempt that cannot be seen, or whose processes cannot be ended, is given up: the run is
    CANCELLED, no result of that attempt is taken any more, and it is stopped when it is seen again.

    Raises:
        RequestError: when the run has ended already.
        WorkFailedError: when it cannot be seen, or was not proven to have stopped within `patience` seconds.
    """
    request_cancel(control, run_id, force=force)
    control.reconciler.look_now(run_id)
    deadline = time.monotonic() + patience
    while not RunState((run := control.reconciler.one(run_id)).state).terminal:
        if not force and _unreachable(control, run):
            raise WorkFailedError(
                "the run is told to stop, but its worker cannot be seen from here",
                where=f"run {run_id}",
                remedy=f"perilune reconcile on its machine; to give it up: perilune cancel {run_id} --force",
            )
        if time.monotonic() > deadline:
            raise WorkFailedError(
                "the run is told to stop and is not yet proven to have stopped",
                where=f"run {run_id}",
                remedy="perilune reconcile goes on trying",
            )
        time.sleep(POLL_SECONDS)
    return run


def _unreachable(control: Control, run: Run) -> bool:
    with control.store.snapshot() as session:
        attempt = session.get(Attempt, (run.id, run.current_epoch))
    return attempt is not None and attempt.reachability == Reachability.UNREACHABLE


def request_cancel(control: Control, run_id: str, *, force: bool = False) -> None:
    """Record that a run is to stop, if need be without proof, and that no stage is to follow it.

    Whoever reconciles next stops it.

    Raises:
        RequestError: when the run has ended already.
    """
    require_own_run(control.home, run_id)
    with control.store.transaction() as session:
        run = session.get_one(Run, run_id)
        if RunState(run.state).terminal:
            raise RequestError(f"the run has {_ended(run.state)} already", where=f"run {run_id}")
        if run.desired != RunState.CANCELLED:
            run.desired = RunState.CANCELLED.value
            record(session, "run.cancel_requested", run_id=run_id, epoch=run.current_epoch)
        end_submissions_of(session, run, "cancelled")
        if force and not run.forced:
            run.forced = True
            record(session, "run.cancel_forced", run_id=run_id, epoch=run.current_epoch)


def cancel_experiment(control: Control, experiment_id: str, *, force: bool = False) -> list[Run]:
    """Stop what is under way of an experiment, and begin no further stage of it.

    A run that another experiment wants as well goes on for that one.

    Returns:
        The runs that were stopped, in their last states; none between two stages.

    Raises:
        RequestError: when nothing of it is under way, and no stage is to be begun.
        WorkFailedError: as `cancel`.
    """
    stopping = request_experiment_cancel(control, experiment_id)
    return [cancel(control, run_id, force=force) for run_id in stopping]


def request_experiment_cancel(control: Control, experiment_id: str) -> list[str]:
    """Record that no further stage of an experiment is to begin; returns the runs that are to be stopped.

    Raises:
        RequestError: when nothing of it is under way, and no stage is to be begun.
    """
    with control.store.transaction() as session:
        experiment = session.get_one(Experiment, experiment_id)
        under_way = runs_under_way(session, experiment_id)
        for run in under_way:
            require_own_run(control.home, run.id)
        if not under_way and not experiment.requested:
            raise RequestError(
                "nothing of the experiment is under way",
                where=f"experiment {experiment.name}",
                remedy=f"perilune runs -e {experiment_id}",
            )
        end_submission(session, experiment, "cancelled")
        return [run.id for run in under_way if not requested_elsewhere(session, run)]


def left_running(control: Control, experiment_id: str) -> Sequence[Run]:
    """What is under way of an experiment, as after it was cancelled: what another one wants too."""
    with control.store.snapshot() as session:
        return runs_under_way(session, experiment_id)


def _ended(state: str) -> str:
    return {"cancelled": "been cancelled"}.get(state, state)


def retry(control: Control, run_id: str) -> Run:
    """Submit the same bundle again: a new run, linked to this one, that starts from its last checkpoint.

    It goes where this one went, by the host key that the templates now give for that machine.

    Raises:
        RequestError: when the run is under way or has succeeded.
    """
    run = control.run(run_id)
    if run.state == RunState.SUCCEEDED:
        raise RequestError(
            "the run has succeeded", where=f"run {run_id}", remedy=f"perilune reproduce {run_id}"
        )
    if not RunState(run.state).terminal:
        raise RequestError(
            f"the run is {run.state}", where=f"run {run_id}", remedy=f"perilune cancel {run_id}, then retry"
        )
    template = recorded_template(control.home, run_id)
    if template is not None:
        template = with_present_host_key(control.home, template)
    submission = Submission(run.experiment_id, run.stage, run.task, retry_of=run_id, template=template)

    def copy(destination: Path) -> str:
        attempt_copy(control.home.bundle(run_id), destination)
        return recorded_digest(destination)

    return submit(control.home, control.store, submission, copy, control.intact)


def logs(control: Control, run_id: str, *, follow: bool = False) -> Iterator[str]:
    """The text of a run's log; with `follow`, as it comes, through all attempts, until the run has ended.

    It is as the task printed it: `perilune.terminal.printable` before it is shown.
    """
    if follow:
        require_own_run(control.home, run_id)
    attempt = max(1, control.run(run_id).current_epoch)
    while True:
        runtime = control.home.attempt(run_id, attempt) / "runtime"
        printed, decoder = LogReader(runtime), codecs.getincrementaldecoder("utf-8")(errors="replace")
        while True:
            # Looked at before the log: when it has ended, its end is in the log.
            run = control.reconciler.one(run_id, act=False)
            for data in printed.read():
                yield decoder.decode(data)
            over = RunState(run.state).terminal or run.current_epoch > attempt
            if over or not follow:
                break
            time.sleep(POLL_SECONDS)
        if not log_pieces(runtime):
            yield worker_output(runtime.parent, WORKER_LINES)  # there was never a task
        if run.current_epoch == attempt:
            return
        attempt += 1
        yield f"--- attempt {attempt} ---\n"


def collect(control: Control, run_id: str, destination: Path | None = None) -> list[Path]:
    """Check that a run's evidence is whole, and copy it to `destination` when given.

    Returns:
        The files of the attempt, relative to it.

    Raises:
        RequestError: when there is nothing to collect yet, or something is at `destination`.
        WorkFailedError: when a file differs from what the manifest says, naming the first.
    """
    run = control.run(run_id)
    attempt = control.directory(run)
    if run.current_epoch == 0 or not RunState(run.state).terminal:
        raise RequestError(
            f"the run is {run.state}; there is no whole evidence yet",
            where=f"run {run_id}",
            remedy=f"perilune logs {run_id} -f",
        )
    removed = removed_from(control.home, run_id, run.current_epoch)
    differences = verify(attempt, run.bundle_digest, removed)
    if differences:
        raise WorkFailedError(f"the evidence is damaged: {differences[0]}", where=str(attempt))
    files = sorted(path.relative_to(attempt) for path in attempt.rglob("*") if path.is_file())
    if destination is not None:
        with new_folder("copy the evidence", destination) as building:
            for file in files:
                place(attempt / file, building / file, (attempt / file).stat().st_mode & 0o777)
    return files
