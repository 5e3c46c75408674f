"""Explain why a run is in its state and what happens next, from the record and one observation."""

import time
from dataclasses import dataclass, replace

from perilune.control.machines.budget import accrued, promised
from perilune.control.machines.panic import renting_is_stopped
from perilune.control.queries.lookup import attempts_of, events_after
from perilune.control.record.home import has_daemon
from perilune.control.record.identity import Inherited, inherited
from perilune.control.record.store import Attempt, Machine, Run
from perilune.control.record.transitions import AttemptState, Cleanup, MachineState, RunState
from perilune.control.runs.current_submission import BLOCKED, next_stages
from perilune.control.runs.experiments import Control, read_progress
from perilune.control.runs.planner import Step, retry_class
from perilune.control.runs.queue import Turn, pause_left, turn_of
from perilune.control.runs.stage_failures import REMEDY
from perilune.execution.observation import Observation
from perilune.execution.placements.upload import SENT
from perilune.execution.processes import Presence


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of a run.

    Attributes:
        state: of the run.
        because: the facts that led to it, one sentence each, the oldest first.
        next: what happens by itself, or that nothing does.
        commands: what the user can do, the most likely first.
    """

    state: str
    because: tuple[str, ...]
    next: str
    commands: tuple[str, ...]


MOST_NAMED = 3  # other runs
SILENT_SECONDS = 30.0  # without a heartbeat, which comes every second, before a worker counts as silent

AHEAD = {
    Step.STAGE: "its bundle is copied to its machine",
    Step.START: "a worker is started",
    Step.START_FAILED: "the attempt fails, because its worker did not start",
    Step.ADOPT: "it is recorded as running",
    Step.FINALIZE: "its artifacts are checked and its result committed",
    Step.DIED: "the attempt is recorded as failed, and another starts if the retry budget allows",
    Step.LOSE: "the attempt is abandoned",
    Step.STOP: "it is stopped",
    Step.REFUSED: "the attempt fails, because the machine is the wrong one or refuses access",
    Step.UNREACHABLE: "nothing, until it is reachable again or has been unreachable for too long",
    Step.WAIT: "nothing to do: its worker continues by itself",
}
MACHINE_STATES = {
    MachineState.REQUESTED: "is requested",
    MachineState.READY: "is ready",
    MachineState.DRAINING: "is about to be terminated",
    MachineState.TERMINATING: "is being terminated",
    MachineState.GONE: "is gone",
}


def explain(control: Control, run_id: str) -> Explanation:
    """Explain the state of the run `run_id`, and which stage follows it."""
    run = control.run(run_id)
    if run_id in (others := inherited(control.home)).runs:
        return _of_another_home(run, others)
    result = _explain(control, run)
    errors = tuple(f"the last try failed: {one}" for one in control.reconciler.conditions.all(run_id))
    result = replace(result, because=(*result.because, *errors))
    with control.store.snapshot() as session:
        following = next_stages(session, run)
    if not following:
        return result
    experiment, stage, starts = following[-1]
    if not starts:
        again = f"stage {stage} of {experiment.name} starts with the next `perilune run`"
        return replace(result, next=f"{result.next}; {again}")
    if run.state != RunState.SUCCEEDED:
        return replace(result, next=f"{result.next}; then stage {stage} starts")
    because = (*result.because, *_why_blocked(control, run))
    if has_daemon(control.home):
        return replace(result, because=because, next=f"stage {stage} starts")
    commands = ("perilune daemon", "perilune reconcile", *result.commands)
    return replace(
        result, because=because, next=f"stage {stage} starts with the next command", commands=commands
    )


def _of_another_home(run: Run, others: Inherited) -> Explanation:
    home = others.homes[0] if others.homes else "the original"
    return Explanation(
        run.state,
        (
            f"it was {run.state} when the backup was made from which this home was restored",
            f"it belongs to the home {home}, which knows its current state",
        ),
        "nothing: no command of this home acts on it",
        ("perilune adopt  # only if that home no longer exists",),
    )


def _why_blocked(control: Control, run: Run) -> list[str]:
    """Why the stage after a run could not start at the last try."""
    messages = [row.detail["message"] for row in events_after(control, run_id=run.id) if row.kind == BLOCKED]
    return [f"the next stage could not start: {messages[-1]}"] if messages else []


def _explain(control: Control, run: Run) -> Explanation:
    run_id = run.id
    attempts = attempts_of(control, run_id)
    history = tuple(_ended(attempt) for attempt in attempts if AttemptState(attempt.state).terminal)
    match RunState(run.state):
        case RunState.QUEUED:
            return _queued(control, run, attempts, history)
        case RunState.ACTIVE:
            return _active(control, run, attempts[-1], history)
        case RunState.SUCCEEDED:
            evidence, ahead = "its artifacts are damaged or missing", "a recipe runs the stage again"
            if control.intact(run):
                evidence = "its artifacts are complete and intact"
                ahead = "nothing; a recipe with the same stage reuses it"
            commands = (f"perilune show {run_id}", f"perilune reproduce {run_id}")
            return Explanation(run.state, (*history, evidence), ahead, commands)
        case RunState.FAILED:
            kind = retry_class(run.cause).value
            used = sum(retry_class(one.cause).value == kind for one in attempts)
            budget = getattr(control.reconciler.placements.policy_of(run_id), kind, None)
            why = f"{run.cause} counts as {kind}: at most {budget} retries, and this was failure {used}"
            commands = (f"perilune logs {run_id}", f"perilune retry {run_id}")
            remedy = run.message.partition(f"\n{REMEDY}")[2]
            facts = (*history, why, *([f"its remedy: {remedy}"] if remedy else []))
            return Explanation(run.state, facts, "nothing, unless you retry it", commands)
        case RunState.CANCELLED:
            why = "cancellation was requested" + (", if necessary without proof" if run.forced else "")
            ahead = "nothing, unless you retry it"
            if attempts and attempts[-1].cleanup == Cleanup.PENDING:
                ahead = "every command tries again to stop its remaining processes"
            return Explanation(run.state, (*history, why), ahead, (f"perilune retry {run_id}",))


def _queued(control: Control, run: Run, attempts: list[Attempt], history: tuple[str, ...]) -> Explanation:
    if run.desired == RunState.CANCELLED:
        because = (*history, "cancellation was requested")
        return Explanation(run.state, because, "it is cancelled", ("perilune reconcile",))
    wait = pause_left(control.reconciler.placements, run)
    number = run.current_epoch + 1
    with control.store.snapshot() as session:
        turn = turn_of(session, control.reconciler.placements, run)
    if attempts and attempts[-1].cleanup == Cleanup.PENDING and attempts[-1].state != AttemptState.LOST:
        why = f"attempt {number} waits until attempt {number - 1} is cleaned up"
    elif not turn.has_come:
        return _waits_its_turn(control, run, history, turn)
    elif wait > 0:
        why = f"attempt {number} may start in {wait:.0f} s"
    elif _provider_is_silent(control, run):
        why = f"attempt {number} waits for its provider, which does not list its machines"
    else:
        why = (
            f"attempt {number} may start, and no command is working on it"
            if attempts
            else "no command has started it"
        )
    return Explanation(
        run.state,
        (*history, why),
        f"the next command that reconciles runs starts attempt {number}",
        ("perilune reconcile", "perilune reconcile --watch", f"perilune wait {run.id}"),
    )


def _provider_is_silent(control: Control, run: Run) -> bool:
    placement = control.reconciler.placements.of(run.id)
    return control.reconciler.rentals.newest_epoch(placement, run) is None


def _waits_its_turn(control: Control, run: Run, history: tuple[str, ...], turn: Turn) -> Explanation:
    number = run.current_epoch + 1
    facts = [*history]
    for ids, what in ((turn.taking, "holds a slot"), (turn.before, "is ahead of it")):
        facts += [f"run {other} {what}" for other in ids[:MOST_NAMED]]
        facts += [f"so do {len(ids) - MOST_NAMED} more"] if len(ids) > MOST_NAMED else []
    facts.append(f"attempt {number} waits for a slot: {turn}")
    by_what = "" if has_daemon(control.home) else ", with the next command that reconciles runs"
    commands = tuple(f"perilune explain {other}" for other in turn.taking[:1])
    return Explanation(
        run.state,
        tuple(facts),
        f"attempt {number} starts when a slot is free{by_what}",
        (*commands, f"perilune wait {run.id}"),
    )


def _active(control: Control, run: Run, attempt: Attempt, history: tuple[str, ...]) -> Explanation:
    facts = [*history, f"attempt {attempt.number} is {attempt.state}"]
    if attempt.state == AttemptState.PLANNED and attempt.message:
        return _waits_for_a_machine(control, run, attempt, facts)
    seen, step = control.reconciler.look(run, attempt)
    machines = control.reconciler.rentals.fleet.machines_of(attempt.run_id, attempt.number)
    facts += [fact for one in machines for fact in _machine_facts(one, len(machines))] or [_worker(seen)]
    if run.desired == RunState.CANCELLED:
        facts.append("cancellation was requested")
    progress = read_progress(control.directory(run))
    if progress is not None:
        far = f"{progress['done']:,} of {progress['total']:,} {progress['unit']}"
        facts.append(far if progress["unit"] == SENT else f"its task has done {far}")
    if step is Step.WAIT and (silent := _silent_for(control, attempt)) > SILENT_SECONDS:
        facts.append(f"its worker has not reported for {silent:.0f} s: it is suspended, or its machine hangs")
        ahead = "nothing, until its worker continues or the run is cancelled"
        return Explanation(run.state, tuple(facts), ahead, (f"perilune cancel {run.id}",))
    if step is Step.WAIT:
        commands: tuple[str, ...] = (f"perilune logs {run.id} -f", f"perilune wait {run.id}")
    elif step is Step.UNREACHABLE:
        commands = (f"perilune cancel {run.id} --force",)
    else:
        commands = ("perilune reconcile",)
    return Explanation(run.state, tuple(facts), AHEAD[step], commands)


def _waits_for_a_machine(control: Control, run: Run, attempt: Attempt, facts: list[str]) -> Explanation:
    """No machine may be rented now: because of the daily cap, or after a panic."""
    facts.append(f"no machine is rented for it yet: {attempt.message}")
    lift = ("perilune panic --lift",) if renting_is_stopped(control.home) else ()
    commands = (*lift, "perilune cost", f"perilune cancel {run.id}")
    return Explanation(run.state, tuple(facts), "a machine is rented as soon as that is allowed", commands)


def _machine_facts(machine: Machine, count: int) -> list[str]:
    """The state of one of an attempt's `count` machines; empty if it is ready and reachable."""
    if machine.state == MachineState.READY and machine.unseen_since is None:
        return []
    name = "its machine" if count == 1 else f"its machine {machine.rank} of {count}"
    reason = f": {machine.reason}" if machine.reason else ""
    facts = [f"{name} {MACHINE_STATES[MachineState(machine.state)]}{reason}"]
    if machine.price:
        facts.append(f"{name} has cost {accrued(machine):.4g} of at most {promised(machine):.4g}")
    return [*facts, *([f"the provider of {name} does not answer"] if machine.unseen_since else [])]


def _silent_for(control: Control, attempt: Attempt) -> float:
    """Seconds since the last heartbeat of the attempt's worker arrived, just after an observation."""
    beat = control.home.attempt(attempt.run_id, attempt.number) / "runtime" / "heartbeat.json"
    return time.time() - beat.stat().st_mtime if beat.exists() else 0.0


def _worker(seen: Observation) -> str:
    if seen.unseen:
        return f"it is unreachable: {seen.unseen}"
    if seen.claim is None:
        return "no worker has claimed it yet"
    worker = f"worker {seen.claim.pid}, heartbeat {seen.heartbeat}"
    if seen.verdict is not None:
        return f"its worker has left a verdict: {seen.verdict.message or 'success'}"
    return {
        Presence.PRESENT: f"its worker is alive ({worker})",
        Presence.ABSENT: f"its worker is dead and left no verdict ({worker})",
        Presence.UNKNOWN: f"its worker is unreachable from here ({worker}, on {seen.claim.host})",
    }[seen.worker]


def _ended(attempt: Attempt) -> str:
    message = attempt.message.partition("\n")[0]
    said = message.startswith(attempt.cause or "")  # "stopped on request" says the cause
    why = f": {message if said else f'{attempt.cause}, {message}'}" if attempt.cause else ""
    return f"attempt {attempt.number} {attempt.state}{why}"
