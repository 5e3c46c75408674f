"""What a user may ask of a run besides running it: its log, to stop, to be tried again, to be handed over."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterator
from pathlib import Path

from perilune.bundle.digest import recorded_digest
from perilune.bundle.freeze import attempt_copy
from perilune.bundle.storage import built_beside, place, publish, storage_errors
from perilune.bundle.verify import verify
from perilune.control.experiments import POLL_SECONDS, Control
from perilune.control.store import Run, record
from perilune.control.submission import Wish, submit
from perilune.control.transitions import RunState
from perilune.errors import RequestError, WorkFailedError

CANCEL_PATIENCE = 60.0  # seconds; longer than a task's grace and the proof that it has ended


def cancel(control: Control, run_id: str, *, patience: float = CANCEL_PATIENCE) -> Run:
    """Stop a run: ask its task, wait, then kill. Returns it in its last state.

    It is CANCELLED only when it is proven that none of its processes is left; when it succeeds first,
    success wins. The wish is durable before anything is done, so a killed `cancel` is carried out by
    whatever command comes next.

    Raises:
        RequestError: when the run has ended already.
        WorkFailedError: when it could not be proven to have stopped within `patience` seconds.
    """
    request_cancel(control, run_id)
    deadline = time.monotonic() + patience
    while not RunState((run := control.reconciler.one(run_id)).state).terminal:
        if time.monotonic() > deadline:
            raise WorkFailedError(
                "the run is told to stop and is not yet proven to have stopped",
                where=f"run {run_id}",
                remedy="perilune reconcile goes on trying",
            )
        time.sleep(POLL_SECONDS)
    return run


def request_cancel(control: Control, run_id: str) -> None:
    """Record that a run is to stop; whoever reconciles next stops it.

    Raises:
        RequestError: when the run has ended already.
    """
    with control.store.transaction() as session:
        run = session.get_one(Run, run_id)
        if RunState(run.state).terminal:
            raise RequestError(f"the run has {_ended(run.state)} already", where=f"run {run_id}")
        if run.desired != RunState.CANCELLED:
            run.desired = RunState.CANCELLED.value
            record(session, "run.cancel_requested", run_id=run_id, epoch=run.current_epoch)


def _ended(state: str) -> str:
    return {"cancelled": "been cancelled"}.get(state, state)


def retry(control: Control, run_id: str) -> Run:
    """Submit the same bundle again: a new run, linked to this one, that starts from its last checkpoint.

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
    wish = Wish(run.experiment_id, run.stage, run.task, retry_of=run_id)

    def copy(destination: Path) -> str:
        attempt_copy(control.home.bundle(run_id), destination)
        return recorded_digest(destination)

    return submit(control.home, control.store, wish, copy, control.intact)


def logs(control: Control, run_id: str, *, follow: bool = False) -> Iterator[str]:
    """The text of a run's log; with `follow`, as it comes, through all attempts, until the run has ended."""
    attempt, offset = max(1, control.run(run_id).current_epoch), 0
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while True:
        run = control.reconciler.one(
            run_id, act=False
        )  # looked at before the log: its end is then in the log
        path = _log(control.home.attempt(run_id, attempt))
        if path is not None:
            with path.open("rb") as file:
                file.seek(offset)
                while block := file.read(1 << 16):
                    offset += len(block)
                    yield decoder.decode(block)
        if run.current_epoch > attempt:
            attempt, offset = attempt + 1, 0
            yield f"--- attempt {attempt} ---\n"
            continue
        if not follow or RunState(run.state).terminal:
            return
        time.sleep(POLL_SECONDS)


def _log(attempt: Path) -> Path | None:
    """What the task printed; what the worker said when there was never a task."""
    for name in ("runtime.log", "worker.log"):
        path = attempt / "runtime" / name
        if path.exists() and path.stat().st_size > 0:
            return path
    return None


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
    differences = verify(attempt, run.bundle_digest)
    if differences:
        raise WorkFailedError(f"the evidence is damaged: {differences[0]}", where=str(attempt))
    files = sorted(path.relative_to(attempt) for path in attempt.rglob("*") if path.is_file())
    if destination is not None:
        with storage_errors("copy the evidence", destination), built_beside(destination) as building:
            for file in files:
                place(attempt / file, building / file, (attempt / file).stat().st_mode & 0o777)
            try:
                publish(building, destination)
            except FileExistsError:
                raise RequestError(
                    "something is already here", where=str(destination), remedy="choose another folder"
                ) from None
    return files
