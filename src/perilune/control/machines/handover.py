"""Hand the machines of a finished stage over to the next stage of its experiment, instead of renting others.

Machines wait for the next stage only while a process that starts it is alive. After that process has died,
the next process that reconciles the machines terminates them. Machines are handed over in the transaction
that would otherwise record new ones.
"""

from collections.abc import Iterator, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from perilune.control.machines.budget import accrued_cost, lease_seconds, lease_seconds_left
from perilune.control.machines.leases import Rental
from perilune.control.record.home import Home, has_starter
from perilune.control.record.store import Attempt, EarlierUse, Experiment, Machine, Run, Stage, record_event
from perilune.control.record.transitions import AttemptState, Cleanup, MachineState, RunState
from perilune.control.runs.current_submission import find_requesting
from perilune.execution.providers.protocol import MachineKey

MIN_LEASE_FRACTION = 0.5  # share of its lease that a machine must have left


def waits_for_next_stage(home: Home, session: Session, machine: Machine) -> bool:
    """Return whether the next stage of an experiment will take over this machine of a succeeded stage."""
    run = session.get(Run, machine.run_id)
    if machine.state != MachineState.READY or not _is_reusable(machine):
        return False
    if run is None or run.state != RunState.SUCCEEDED or run.current_epoch != machine.epoch:
        return False
    return any(
        _rents_same_kind(experiment, machine)
        and has_starter(home, experiment.id)
        and _needs_machines_later(session, stage)
        for experiment, stage in find_requesting(session, run.id)
    )


def take_over_machines(session: Session, attempt: Attempt, rental: Rental, nodes: int) -> bool:
    """Give an attempt the machines of the stage before, in the caller's transaction; False if there are none.

    All of them must be ready and clean, and half of their lease must be left.
    """
    for machines in _earlier_machines(session, attempt.run_id):
        if len(machines) == nodes and all(_is_suitable(session, machine, rental) for machine in machines):
            for machine in machines:
                _hand_over(session, machine, attempt)
            return True
    return False


def is_taken_over(machine: Machine) -> bool:
    """Return whether the machine was rented for the attempt of an earlier stage."""
    key = MachineKey.parse(machine.key)
    return key is not None and (key.run_id, key.epoch) != (machine.run_id, machine.epoch)


def _needs_machines_later(session: Session, stage: Stage) -> bool:
    """Return whether the first stage after this one that has not succeeded still has to get machines."""
    later = select(Stage).where(Stage.experiment_id == stage.experiment_id, Stage.position > stage.position)
    for following in session.scalars(later.order_by(Stage.position)):
        if following.run_id is None or following.submission != stage.submission:
            return True
        run = session.get_one(Run, following.run_id)
        if run.state != RunState.SUCCEEDED:
            attempt = session.get(Attempt, (run.id, run.current_epoch))
            is_waiting = run.state == RunState.QUEUED or (
                attempt is not None and attempt.state == AttemptState.PLANNED
            )
            return is_waiting and run.desired != RunState.CANCELLED
    return False


def _earlier_machines(session: Session, run_id: str) -> Iterator[Sequence[Machine]]:
    """Yield the machines of each earlier stage of the run's experiments, the latest stage first."""
    for _, stage in find_requesting(session, run_id):
        earlier = (
            select(Run)
            .join(Stage, Stage.run_id == Run.id)
            .where(
                Stage.experiment_id == stage.experiment_id,
                Stage.submission == stage.submission,
                Stage.position < stage.position,
                Run.state == RunState.SUCCEEDED.value,
            )
        )
        for run in session.scalars(earlier.order_by(Stage.position.desc())):
            query = select(Machine).where(Machine.run_id == run.id, Machine.epoch == run.current_epoch)
            yield session.scalars(query.order_by(Machine.rank)).all()


def _is_suitable(session: Session, machine: Machine, rental: Rental) -> bool:
    attempt = session.get(Attempt, (machine.run_id, machine.epoch))
    asked = (rental.provider, rental.kind, rental.lease.model_dump())
    return (
        (machine.provider, machine.kind, machine.lease) == asked
        and machine.state == MachineState.READY
        and machine.unseen_since is None
        and attempt is not None
        and attempt.cleanup == Cleanup.DONE
        and _is_reusable(machine)
    )


def _is_reusable(machine: Machine) -> bool:
    """Return whether it is not about to be preempted, and enough of its lease is left."""
    stays = not machine.notice and machine.missing_since is None
    return stays and lease_seconds_left(machine) >= MIN_LEASE_FRACTION * lease_seconds(machine)


def _rents_same_kind(experiment: Experiment, machine: Machine) -> bool:
    """Return whether the current submission of an experiment rents machines like this one."""
    placement = (experiment.template or {}).get("placement", {})
    asked = tuple(placement.get(name) for name in ("provider", "kind", "lease"))
    return asked == (machine.provider, machine.kind, machine.lease)


def _hand_over(session: Session, machine: Machine, attempt: Attempt) -> None:
    before = session.scalars(select(EarlierUse.cost).where(EarlierUse.machine_key == machine.key))
    spent = accrued_cost(machine) - sum(before)
    session.add(EarlierUse(machine_key=machine.key, run_id=machine.run_id, epoch=machine.epoch, cost=spent))
    earlier = f"{machine.run_id}/{machine.epoch}"
    machine.run_id, machine.epoch, machine.idle_since = attempt.run_id, attempt.number, None
    record_event(
        session,
        "machine.taken_over",
        run_id=attempt.run_id,
        epoch=attempt.number,
        machine=machine.key,
        earlier=earlier,
    )
