"""Invariants under failures, checked in the database, the files and the cloud's bill."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from perilune.bundle.verify import verify
from perilune.control.machines.leases import compute_cost
from perilune.control.record.store import Attempt, Event, Machine, Run, verify_events
from perilune.control.record.transitions import AttemptState, MachineState, RunState
from perilune.execution.log import LogReader
from perilune.files import read_json
from perilune.lab.laboratory import LEASE, STEPS, Laboratory

GRACE_SECONDS = 60.0  # the cost of this much machine time may be billed beyond a lease's limit
FINAL_EVENTS = tuple(f"run.{state.value}" for state in RunState if state.is_terminal)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The check of one invariant: its name, its statement, and one sentence for each violation."""

    name: str
    says: str
    broken: tuple[str, ...]


def check_invariants(lab: Laboratory) -> list[Verdict]:
    """Check all invariants of a lab whose runs and machines have ended."""
    with lab.control.store.snapshot() as session:
        return [Verdict(name, says, tuple(find(lab, session))) for name, (says, find) in INVARIANTS.items()]


def _find_lost_runs(lab: Laboratory, session: Session) -> Iterator[str]:
    for run_id, seed in lab.submitted.items():
        run = session.get(Run, run_id)
        if run is None or run.state != RunState.SUCCEEDED:
            yield f"run {run_id}: {'unknown' if run is None else f'{run.state}, {run.message}'}"
            continue
        total = read_json(lab.control.directory(run) / "artifacts" / "data" / "total.json")["total"]
        expected = seed * STEPS * (STEPS + 1) // 2
        if total != expected:
            yield f"run {run_id}: its result is {total} instead of {expected}"


def _find_double_results(lab: Laboratory, session: Session) -> Iterator[str]:
    succeeded = select(Attempt.run_id).where(Attempt.state == AttemptState.SUCCEEDED.value)
    for run_id, number in Counter(session.scalars(succeeded)).items():
        if number != 1:
            yield f"run {run_id}: {number} attempts succeeded"


def _find_stale_results(lab: Laboratory, session: Session) -> Iterator[str]:
    for run in session.scalars(select(Run).where(Run.state == RunState.SUCCEEDED.value)):
        attempt = session.get(Attempt, (run.id, run.current_epoch))
        if attempt is None or attempt.manifest_digest != run.manifest_digest:
            yield f"run {run.id}: its result is not that of attempt {run.current_epoch}"
        elif problems := verify(lab.control.directory(run), run.bundle_digest):
            yield f"run {run.id}: {problems[0]}"


def _find_live_machines(lab: Laboratory, session: Session) -> Iterator[str]:
    bill = lab.read_bill()
    for key in bill.get("alive", ["the cloud does not answer"]):
        yield f"alive: {key}"
    known = {machine.key: machine for machine in session.scalars(select(Machine))}
    for key in bill.get("costs", {}).keys() - known.keys():
        yield f"created but not recorded: {key}"
    for machine in known.values():
        billed = bill.get("costs", {}).get(machine.key, 0.0)
        if machine.state != MachineState.GONE:
            yield f"{machine.state}: {machine.key}"
        elif billed > LEASE.max_cost + compute_cost(machine.price, GRACE_SECONDS):
            yield f"{machine.key} cost {billed:.4g}, and its lease allows {LEASE.max_cost:.4g}"


def _find_log_gaps(lab: Laboratory, session: Session) -> Iterator[str]:
    for run in session.scalars(select(Run).where(Run.state == RunState.SUCCEEDED.value)):
        text = b"".join(LogReader(lab.control.directory(run) / "runtime").read()).decode()
        begun = re.findall(r"starts after step (\d+)$", text, re.MULTILINE)
        steps = [int(step) for step in re.findall(r"^[\d:]+Z step (\d+)$", text, re.MULTILINE)]
        # `steps` is empty if the previous attempt completed all of them.
        if len(begun) != 1 or steps != list(range(int(begun[0]) + 1, STEPS + 1)):
            yield f"run {run.id}: its log starts after {begun} and has the steps {steps}"


def _find_changes_after_end(lab: Laboratory, session: Session) -> Iterator[str]:
    if (broken := verify_events(session)) is not None:
        yield f"event {broken} was changed"
    ended: set[str | None] = set()
    kinds = select(Event.run_id, Event.kind).where(Event.kind.startswith("run.")).order_by(Event.seq)
    for run_id, kind in session.execute(kinds):
        if run_id in ended:
            yield f"run {run_id}: {kind} after its end"
        if kind in FINAL_EVENTS:
            ended.add(run_id)


def _find_canary(lab: Laboratory, session: Session) -> Iterator[str]:
    needle = lab.canary.encode()
    for path in lab.folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and needle in _read_bytes(path):
            yield str(path)


def _find_interventions(lab: Laboratory, session: Session) -> Iterator[str]:
    requests = select(Event.kind).where(Event.kind.in_(("run.cancel_requested", "run.cancel_forced")))
    yield from session.scalars(requests)
    if lab.crashes:
        log = (lab.folder / "controller.log").read_text(errors="replace")
        errors = ["no error in its log", *(line for line in log.splitlines() if line.startswith("error"))]
        yield f"the control process crashed {lab.crashes} times: {errors[-1]}"


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # a socket, or deleted meanwhile
        return b""


INVARIANTS: dict[str, tuple[str, Callable[[Laboratory, Session], Iterator[str]]]] = {
    "I1": ("every accepted run has ended, with the right result", _find_lost_runs),
    "I2": ("no run has two results", _find_double_results),
    "I3": ("every result is complete and from the current attempt", _find_stale_results),
    "I4": ("every machine is gone, and cost no more than its limit", _find_live_machines),
    "I5": ("no log line is missing or duplicated", _find_log_gaps),
    "I6": ("ended runs stay ended, and no event was changed", _find_changes_after_end),
    "I7": ("the secret is in no file", _find_canary),
    "I8": ("no intervention was needed", _find_interventions),
}
