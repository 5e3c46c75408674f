"""Explain why a run is in its state and what happens next, from the record and one observation."""

import time
from dataclasses import dataclass, replace

from perilune.control.machines.budget import accrued_cost, max_total_cost
from perilune.control.machines.panic import renting_is_stopped
from perilune.control.queries.lookup import events_after, list_attempts
from perilune.control.record.home import has_daemon, has_starter
from perilune.control.record.identity import Inherited, read_inherited
from perilune.control.record.store import Attempt, Machine, Run
from perilune.control.record.transitions import AttemptState, Cleanup, MachineState, RunState
from perilune.control.runs.current_submission import BLOCKED_EVENT, find_requesting, next_stages
from perilune.control.runs.experiments import Control, read_progress
from perilune.control.runs.planner import Step, retry_class
from perilune.control.runs.progress import REMEDY_PREFIX
from perilune.control.runs.queue import QueuePosition, find_position, retry_pause_left
from perilune.execution.observation import Observation
from perilune.execution.placements.upload import SENT_UNIT
from perilune.execution.processes import Presence


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of a run.

    Attributes:
        because: the facts that led to it, one sentence each, the oldest first.
        next: what happens by itself, or that nothing does.
        commands: what the user can do, the most likely first.
    """

    state: str
    because: tuple[str, ...]
    next: str
    commands: tuple[str, ...]


MAX_NAMED_RUNS = 3  # runs in the queue that an explanation names
SILENT_SECONDS = 30.0  # without a heartbeat after which a worker counts as silent; it beats every second

NEXT_BY_STEP = {
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


def explain_run(control: Control, run_id: str) -> Explanation:
    """Explain the state of the run `run_id`, and which stage follows it."""
    run = control.run(run_id)
    if run_id in (others := read_inherited(control.home)).runs:
        return _explain_foreign_run(run, others)
    result = _explain_own_run(control, run)
    errors = tuple(f"the last try failed: {error}" for error in control.reconciler.conditions.all(run_id))
    result = replace(result, because=(*result.because, *errors))
    with control.store.snapshot() as session:
        following = next_stages(session, run)
    if not following:
        return result
    experiment, stage, starts = following[-1]
    if not starts:
        again = f"stage {stage} of {experiment.name} starts with the next `perilune run`"
        if run.state in {RunState.FAILED, RunState.CANCELLED}:
            again = f"the next `perilune run` repeats it, then starts stage {stage} of {experiment.name}"
        return replace(result, next=f"{result.next}; {again}")
    if run.state != RunState.SUCCEEDED:
        return replace(result, next=f"{result.next}; then stage {stage} starts")
    because = (*result.because, *_blocked_reason(control, run))
    if has_daemon(control.home) or has_starter(control.home, experiment.id):
        return replace(result, because=because, next=f"stage {stage} starts")
    commands = ("perilune daemon", "perilune reconcile", *result.commands)
    return replace(
        result, because=because, next=f"stage {stage} starts with the next command", commands=commands
    )


def _explain_foreign_run(run: Run, others: Inherited) -> Explanation:
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


def _blocked_reason(control: Control, run: Run) -> list[str]:
    """Return why the stage after a run could not start at the last try; empty if it could."""
    messages = [
        row.detail["message"] for row in events_after(control, run_id=run.id) if row.kind == BLOCKED_EVENT
    ]
    return [f"the next stage could not start: {messages[-1]}"] if messages else []


def _explain_own_run(control: Control, run: Run) -> Explanation:
    run_id = run.id
    attempts = list_attempts(control, run_id)
    history = tuple(_describe_end(attempt) for attempt in attempts if AttemptState(attempt.state).is_terminal)
    match RunState(run.state):
        case RunState.QUEUED:
            return _explain_queued(control, run, attempts, history)
        case RunState.ACTIVE:
            return _explain_active(control, run, attempts[-1], history)
        case RunState.SUCCEEDED:
            intact = control.is_intact(run)
            evidence = f"its artifacts are {'complete and intact' if intact else 'damaged or missing'}"
            ahead = "a recipe with the same stage " + ("reuses it" if intact else "runs it again")
            command = f"perilune {'reproduce' if intact else 'verify'} {run_id}"
            return Explanation(run.state, (*history, evidence), ahead, (f"perilune show {run_id}", command))
        case RunState.FAILED:
            kind = retry_class(run.cause).value
            used = sum(retry_class(attempt.cause).value == kind for attempt in attempts)
            budget = getattr(control.reconciler.placements.retry_policy(run_id), kind, None)
            why = f"{run.cause} counts as {kind}: at most {budget} retries, and this was failure {used}"
            commands = (f"perilune logs {run_id}", f"perilune retry {run_id}")
            remedy = run.message.partition(f"\n{REMEDY_PREFIX}")[2]
            ahead = "nothing, unless you retry it" + (f"; the error suggests: {remedy}" if remedy else "")
            return Explanation(run.state, (*history, why), ahead, commands)
        case RunState.CANCELLED:
            why = "cancellation was requested" + (", if necessary without proof" if run.forced else "")
            ahead = "nothing, unless you retry it"
            if attempts and attempts[-1].cleanup == Cleanup.PENDING:
                ahead = "every command tries again to stop its remaining processes"
            return Explanation(run.state, (*history, why), ahead, (f"perilune retry {run_id}",))


def _explain_queued(
    control: Control, run: Run, attempts: list[Attempt], history: tuple[str, ...]
) -> Explanation:
    if run.desired == RunState.CANCELLED:
        because = (*history, "cancellation was requested")
        return Explanation(run.state, because, "it is cancelled", ("perilune reconcile",))
    wait, has_command = retry_pause_left(control.reconciler.placements, run), _has_live_command(control, run)
    number = run.current_epoch + 1
    with control.store.snapshot() as session:
        turn = find_position(session, control.reconciler.placements, run)
    if attempts and attempts[-1].cleanup == Cleanup.PENDING and attempts[-1].state != AttemptState.LOST:
        why = f"attempt {number} waits until attempt {number - 1} is cleaned up"
    elif not turn.can_start:
        return _explain_queue_position(control, run, history, turn)
    elif wait > 0:
        why = f"attempt {number} may start in {wait:.0f} s"
    elif control.reconciler.rentals.newest_epoch(control.reconciler.placements.get(run.id), run) is None:
        why = f"attempt {number} waits for its provider, which does not list its machines"
    elif has_command:
        why = f"attempt {number} is about to start"
    else:
        why = (
            f"attempt {number} may start, and no command is working on it"
            if attempts
            else "no command has started it"
        )
    starter = "command that is running" if has_command else "next command that reconciles runs"
    commands = () if has_command else ("perilune reconcile", "perilune reconcile --watch")
    ahead = f"the {starter} starts attempt {number}"
    return Explanation(run.state, (*history, why), ahead, (*commands, f"perilune wait {run.id}"))


def _has_live_command(control: Control, run: Run) -> bool:
    """Return whether a daemon, or a command that runs or watches an experiment of this run, is alive."""
    with control.store.snapshot() as session:
        experiments = [experiment.id for experiment, _ in find_requesting(session, run.id)]
    return has_daemon(control.home) or any(has_starter(control.home, each) for each in experiments)


def _explain_queue_position(
    control: Control, run: Run, history: tuple[str, ...], turn: QueuePosition
) -> Explanation:
    number = run.current_epoch + 1
    facts = [*history]
    for ids, what in ((turn.running, "holds a slot"), (turn.ahead, "is ahead of it")):
        facts += [f"run {other} {what}" for other in ids[:MAX_NAMED_RUNS]]
        facts += [f"so do {len(ids) - MAX_NAMED_RUNS} more"] if len(ids) > MAX_NAMED_RUNS else []
    facts.append(f"attempt {number} waits for a slot: {turn}")
    by_what = "" if _has_live_command(control, run) else ", with the next command that reconciles runs"
    commands = tuple(f"perilune explain {other}" for other in turn.running[:1])
    return Explanation(
        run.state,
        tuple(facts),
        f"attempt {number} starts when a slot is free{by_what}",
        (*commands, f"perilune wait {run.id}"),
    )


def _explain_active(control: Control, run: Run, attempt: Attempt, history: tuple[str, ...]) -> Explanation:
    facts = [*history, f"attempt {attempt.number} is {attempt.state}"]
    if attempt.state == AttemptState.PLANNED and attempt.message:
        return _explain_no_machine(control, run, attempt, facts)
    observation, step = control.reconciler.observe(run, attempt)
    machines = control.reconciler.rentals.fleet.machines_of(attempt.run_id, attempt.number)
    facts += [fact for machine in machines for fact in _machine_facts(machine, len(machines))] or [
        _describe_worker(observation)
    ]
    if run.desired == RunState.CANCELLED:
        facts.append("cancellation was requested")
    progress = read_progress(control.directory(run))
    if progress is not None:
        far = f"{progress['done']:,} of {progress['total']:,} {progress['unit']}"
        facts.append(far if progress["unit"] == SENT_UNIT else f"its task has done {far}")
    if step is Step.WAIT and (silent := _heartbeat_age(control, attempt)) > SILENT_SECONDS:
        facts.append(f"its worker has not reported for {silent:.0f} s: it is suspended, or its machine hangs")
        ahead = "nothing, until its worker continues or the run is cancelled"
        return Explanation(run.state, tuple(facts), ahead, (f"perilune cancel {run.id}",))
    if step is Step.WAIT or (step is not Step.UNREACHABLE and _has_live_command(control, run)):
        commands: tuple[str, ...] = (f"perilune logs {run.id} -f", f"perilune wait {run.id}")
    elif step is Step.UNREACHABLE:
        commands = (f"perilune cancel {run.id} --force",)
    else:
        commands = ("perilune reconcile",)
    return Explanation(run.state, tuple(facts), NEXT_BY_STEP[step], commands)


def _explain_no_machine(control: Control, run: Run, attempt: Attempt, facts: list[str]) -> Explanation:
    """Explain that no machine may be rented now, because of the daily cap or after a panic."""
    facts.append(f"no machine is rented for it yet: {attempt.message}")
    lift = ("perilune panic --lift",) if renting_is_stopped(control.home) else ()
    commands = (*lift, "perilune cost", f"perilune cancel {run.id}")
    return Explanation(run.state, tuple(facts), "a machine is rented as soon as that is allowed", commands)


def _machine_facts(machine: Machine, count: int) -> list[str]:
    """Return the state of one of an attempt's `count` machines; empty if it is ready and reachable."""
    if machine.state == MachineState.READY and machine.unseen_since is None:
        return []
    name = "its machine" if count == 1 else f"its machine {machine.rank} of {count}"
    reason = f": {machine.reason}" if machine.reason else ""
    facts = [f"{name} {MACHINE_STATES[MachineState(machine.state)]}{reason}"]
    if machine.price:
        facts.append(f"{name} has cost {accrued_cost(machine):.4g} of at most {max_total_cost(machine):.4g}")
    return [*facts, *([f"the provider of {name} does not answer"] if machine.unseen_since else [])]


def _heartbeat_age(control: Control, attempt: Attempt) -> float:
    """Return the seconds since the attempt's last heartbeat arrived, just after an observation."""
    beat = control.home.attempt(attempt.run_id, attempt.number) / "runtime" / "heartbeat.json"
    return time.time() - beat.stat().st_mtime if beat.exists() else 0.0


def _describe_worker(observation: Observation) -> str:
    if observation.unseen:
        return f"it is unreachable: {observation.unseen}"
    if observation.claim is None:
        return "no worker has claimed it yet"
    worker = f"worker {observation.claim.pid}, heartbeat {observation.heartbeat}"
    if observation.verdict is not None:
        return f"its worker has left a verdict: {observation.verdict.message or 'success'}"
    return {
        Presence.PRESENT: f"its worker is alive ({worker})",
        Presence.ABSENT: f"its worker is dead and left no verdict ({worker})",
        Presence.UNKNOWN: f"its worker is unreachable from here ({worker}, on {observation.claim.host})",
    }[observation.worker]


def _describe_end(attempt: Attempt) -> str:
    message = attempt.message.partition("\n")[0]
    said = message.startswith(attempt.cause or "")  # "stopped on request" says the cause
    why = f": {message if said else f'{attempt.cause}, {message}'}" if attempt.cause else ""
    return f"attempt {attempt.number} {attempt.state}{why}"
