"""Why a run is in its state, and what comes next: from the record and one look. Nothing is changed."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from perilune.control.machines.facts import machine_facts
from perilune.control.machines.panic import renting_is_stopped
from perilune.control.queries.lookup import attempts_of, events_after
from perilune.control.record.home import has_daemon
from perilune.control.record.identity import Inherited, inherited
from perilune.control.record.store import Attempt, Run
from perilune.control.record.transitions import AttemptState, Cleanup, RunState
from perilune.control.runs.current_submission import BLOCKED, next_stages
from perilune.control.runs.experiments import Control, read_progress
from perilune.control.runs.planner import Step, retry_class
from perilune.control.runs.queue import Turn, pause_left, turn_of
from perilune.execution.observation import Observation
from perilune.execution.placements.upload import SENT
from perilune.execution.processes import Presence


@dataclass(frozen=True, slots=True)
class Explanation:
    """An answer in words.

    Attributes:
        state: of the run.
        because: what led to it, a sentence a fact, the oldest first.
        next: what will happen by itself, or that nothing will.
        commands: what the user can do about it, the likeliest first.
    """

    state: str
    because: tuple[str, ...]
    next: str
    commands: tuple[str, ...]


MOST_NAMED = 3  # other runs
SILENT_SECONDS = 30.0  # without a heartbeat, after which a worker is said to be silent; it beats every second

AHEAD = {
    Step.STAGE: "its bundle is copied to where it will run",
    Step.START: "a worker is started",
    Step.START_FAILED: "the attempt fails: no worker came up",
    Step.ADOPT: "it is recorded as running",
    Step.FINALIZE: "its evidence is checked and its result committed",
    Step.DIED: "the attempt is recorded as failed, and another begins if the budget allows",
    Step.LOSE: "the attempt is given up",
    Step.STOP: "it is stopped",
    Step.REFUSED: "the attempt fails: the machine is the wrong one, or lets nobody in",
    Step.UNREACHABLE: "nothing, until it is seen again or has been out of sight for too long",
    Step.WAIT: "nothing: its worker goes on by itself",
}


def explain(control: Control, run_id: str) -> Explanation:
    """Explain the run `run_id` as it stands, and say which stage follows it."""
    run = control.run(run_id)
    if run_id in (others := inherited(control.home)).runs:
        return _of_another_home(run, others)
    told = _explain(control, run)
    errors = tuple(f"the last try failed: {one}" for one in control.reconciler.conditions.all(run_id))
    told = replace(told, because=(*told.because, *errors))
    with control.store.snapshot() as session:
        following = next_stages(session, run)
    if not following:
        return told
    experiment, stage, requested = following[-1]
    if not requested:
        again = f"stage {stage} of {experiment.name} begins when `perilune run` asks for it again"
        return replace(told, next=f"{told.next}; {again}")
    if run.state != RunState.SUCCEEDED:
        return replace(told, next=f"{told.next}; then stage {stage} begins")
    by_itself = has_daemon(control.home)
    because = [*told.because, *_why_it_waits(control, run)]
    commands = told.commands if by_itself else ("perilune daemon", "perilune reconcile", *told.commands)
    whoever = "" if by_itself else ", by whatever command goes on with runs"
    return replace(told, because=tuple(because), next=f"stage {stage} begins{whoever}", commands=commands)


def _of_another_home(run: Run, others: Inherited) -> Explanation:
    home = others.homes[0] if others.homes else "the original"
    return Explanation(
        run.state,
        (
            f"it was {run.state} when the backup was made from which this home was restored",
            f"it belongs to the home {home}, which knows what has become of it",
        ),
        "nothing: no command of this home acts on it",
        ("perilune adopt  # only if that home is gone",),
    )


def _why_it_waits(control: Control, run: Run) -> list[str]:
    """Why the stage after a run could not be begun when that was tried last."""
    said = [row.detail["message"] for row in events_after(control, run_id=run.id) if row.kind == BLOCKED]
    return [f"the next stage could not be begun: {said[-1]}"] if said else []


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
            whole = control.intact(run)
            evidence = (
                "its evidence lies where it was committed" if whole else "its evidence is damaged or gone"
            )
            ahead = (
                "nothing; a recipe with the same stage reuses it"
                if whole
                else "a recipe runs the stage again"
            )
            commands = (f"perilune show {run_id}", f"perilune reproduce {run_id}")
            return Explanation(run.state, (*history, evidence), ahead, commands)
        case RunState.FAILED:
            kind = retry_class(run.cause).value
            used = sum(retry_class(one.cause).value == kind for one in attempts)
            budget = getattr(control.reconciler.placements.policy_of(run_id), kind, None)
            why = (
                f"{run.cause} counts as {kind}: tried again {budget} times at most, and this was time {used}"
            )
            commands = (f"perilune logs {run_id}", f"perilune retry {run_id}")
            return Explanation(run.state, (*history, why), "nothing, unless it is asked for", commands)
        case RunState.CANCELLED:
            asked = "it was to stop, if need be without proof" if run.forced else "it was to stop"
            ahead = "nothing, unless it is asked for"
            if attempts and attempts[-1].cleanup == Cleanup.PENDING:
                ahead = "every command goes on trying to stop what may be left of it"
            return Explanation(run.state, (*history, asked), ahead, (f"perilune retry {run_id}",))


def _queued(control: Control, run: Run, attempts: list[Attempt], history: tuple[str, ...]) -> Explanation:
    if run.desired == RunState.CANCELLED:
        return Explanation(run.state, (*history, "it is to stop"), "it is cancelled", ("perilune reconcile",))
    wait = pause_left(control.reconciler.placements, run)
    number = run.current_epoch + 1
    with control.store.snapshot() as session:
        turn = turn_of(session, control.reconciler.placements, run)
    if attempts and attempts[-1].cleanup == Cleanup.PENDING and attempts[-1].state != AttemptState.LOST:
        why = f"attempt {number} waits until nothing of attempt {number - 1} is left"
    elif not turn.has_come:
        return _waits_its_turn(control, run, history, turn)
    elif wait > 0:
        why = f"attempt {number} may begin in {wait:.0f} s"
    elif _provider_is_silent(control, run):
        why = f"attempt {number} waits for its provider, which does not say what machines there are"
    else:
        why = f"attempt {number} may begin, and no command is at it" if attempts else "nobody has begun it"
    return Explanation(
        run.state,
        (*history, why),
        f"the next command that goes on with runs begins attempt {number}",
        ("perilune reconcile", "perilune reconcile --watch", f"perilune wait {run.id}"),
    )


def _provider_is_silent(control: Control, run: Run) -> bool:
    placement = control.reconciler.placements.of(run.id)
    return control.reconciler.rentals.newest_epoch(placement, run) is None


def _waits_its_turn(control: Control, run: Run, history: tuple[str, ...], turn: Turn) -> Explanation:
    number = run.current_epoch + 1
    facts = [*history]
    for ids, what in ((turn.taking, "holds a slot"), (turn.before, "goes before it")):
        facts += [f"run {other} {what}" for other in ids[:MOST_NAMED]]
        facts += [f"so do {len(ids) - MOST_NAMED} more"] if len(ids) > MOST_NAMED else []
    facts.append(f"attempt {number} waits its turn: {turn}")
    whoever = "" if has_daemon(control.home) else ", by whatever command goes on with runs"
    commands = tuple(f"perilune explain {other}" for other in turn.taking[:1])
    return Explanation(
        run.state,
        tuple(facts),
        f"attempt {number} begins when its turn has come{whoever}",
        (*commands, f"perilune wait {run.id}"),
    )


def _active(control: Control, run: Run, attempt: Attempt, history: tuple[str, ...]) -> Explanation:
    facts = [*history, f"attempt {attempt.number} is {attempt.state}"]
    if attempt.state == AttemptState.PLANNED and attempt.message:
        return _waits_for_a_machine(control, run, attempt, facts)
    seen, step = control.reconciler.look(run, attempt)
    facts += machine_facts(control.reconciler.rentals.fleet, attempt) or [_worker(seen)]
    if run.desired == RunState.CANCELLED:
        facts.append("it is to stop")
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
    """No machine may be rented now: over the daily cap, or after a panic."""
    facts += machine_facts(control.reconciler.rentals.fleet, attempt)
    lift = ("perilune panic --lift",) if renting_is_stopped(control.home) else ()
    commands = (*lift, "perilune cost", f"perilune cancel {run.id}")
    return Explanation(run.state, tuple(facts), "a machine is rented as soon as that is allowed", commands)


def _silent_for(control: Control, attempt: Attempt) -> float:
    """Seconds since a heartbeat of the attempt's worker came home, after a look just now."""
    beat = control.home.attempt(attempt.run_id, attempt.number) / "runtime" / "heartbeat.json"
    return time.time() - beat.stat().st_mtime if beat.exists() else 0.0


def _worker(seen: Observation) -> str:
    if seen.unseen:
        return f"it cannot be seen: {seen.unseen}"
    if seen.claim is None:
        return "no worker has claimed it yet"
    told = f"worker {seen.claim.pid}, heartbeat {seen.heartbeat}"
    if seen.verdict is not None:
        return f"its worker has left a verdict: {seen.verdict.message or 'success'}"
    return {
        Presence.PRESENT: f"its worker lives ({told})",
        Presence.ABSENT: f"its worker is dead and left no verdict ({told})",
        Presence.UNKNOWN: f"its worker cannot be seen from here ({told}, on {seen.claim.host})",
    }[seen.worker]


def _ended(attempt: Attempt) -> str:
    said = attempt.message.partition("\n")[0]
    return f"attempt {attempt.number} {attempt.state}" + (
        f": {attempt.cause}, {said}" if attempt.cause else ""
    )
