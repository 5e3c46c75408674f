"""What there is to say of the rented machine of an attempt, in words."""

from __future__ import annotations

from perilune.control.machines.budget import accrued, promised
from perilune.control.machines.lifecycle import Fleet
from perilune.control.record.store import Attempt, Machine
from perilune.control.record.transitions import AttemptState, MachineState

WORDS = {
    MachineState.REQUESTED: "is asked for",
    MachineState.READY: "is there",
    MachineState.DRAINING: "is about to go",
    MachineState.TERMINATING: "is asked to end, until that is proven",
    MachineState.GONE: "is gone",
}


def machine_facts(fleet: Fleet, attempt: Attempt) -> list[str]:
    """Why an attempt has no machine yet, or how its machines are; empty once that matters no more."""
    if AttemptState(attempt.state) is AttemptState.PLANNED and attempt.message:
        return [f"no machine is rented for it yet: {attempt.message}"]
    machines = fleet.machines_of(attempt.run_id, attempt.number)
    return [fact for machine in machines for fact in _facts(machine, len(machines))]


def _facts(machine: Machine, count: int) -> list[str]:
    if machine.state == MachineState.READY and machine.unseen_since is None:
        return []
    name = "its machine" if count == 1 else f"its machine {machine.rank} of {count}"
    facts = [f"{name} {WORDS[MachineState(machine.state)]}{f': {machine.reason}' if machine.reason else ''}"]
    if machine.price:
        facts.append(f"{name} has cost {accrued(machine):.4g} of at most {promised(machine):.4g}")
    return [*facts, *([f"the provider of {name} does not answer"] if machine.unseen_since else [])]
