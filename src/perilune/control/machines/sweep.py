"""What no record asks for: machines that carry our tag and that nothing here knows of, found and ended."""

from __future__ import annotations

import time

from perilune.control.machines.leases import Lease
from perilune.control.machines.lifecycle import Fleet
from perilune.control.record.clock import Instant
from perilune.control.record.store import Machine, record
from perilune.control.record.transitions import MachineState
from perilune.execution.providers.protocol import MachineKey, MachineStatus, RentedMachine

SWEEP_SECONDS = 60.0
GRACE_SECONDS = 120.0  # for which a machine that nothing knows of may exist
OVER = Lease(max_lifetime=1.0, idle=1.0, max_cost=1e-9, ready_within=1.0)  # of an unrecorded machine


def reconcile_all(fleet: Fleet) -> None:
    """Take every machine that is not proven gone one step on."""
    for machine in fleet.all():
        fleet.reconcile(machine.key)


def sweep(fleet: Fleet, grace: float = GRACE_SECONDS) -> list[str]:
    """Compare what every provider lists with what is known; returns the keys of what is ended for it.

    A machine that nothing knows of is left alone for `grace` seconds, by its provider's own count, and then
    recorded as one that is to go. One that was recorded as gone and is listed alive is ended like any other.
    """
    found = []
    for provider in fleet.providers.names():
        listing = fleet.listings.of(provider, fresh=True)
        for machine in (listing.machines or {}).values():
            if machine.status is MachineStatus.ENDED:
                continue
            recorded = fleet.machine(machine.key)
            if recorded is not None and recorded.state != MachineState.GONE:
                continue
            if recorded is None:
                if machine.billed_seconds < grace:
                    continue
                _adopt(fleet, provider, machine, listing.at)
            found.append(machine.key)
            fleet.reconcile(machine.key)
    return found


def _adopt(fleet: Fleet, provider: str, machine: RentedMachine, now: Instant) -> None:
    """Record a machine that nothing knows of, as one whose lease is over: it is tended, and so ended."""
    key = MachineKey.parse(machine.key)
    began = Instant(now.boot, now.seconds - machine.billed_seconds, now.wall - machine.billed_seconds)
    with fleet.store.transaction() as session:
        if session.get(Machine, machine.key) is not None:
            return
        row = Machine(
            key=machine.key,
            provider=provider,
            run_id=key.run_id if key else "",
            epoch=key.epoch if key else 0,
            rank=key.rank if key else 0,
            state=MachineState.TERMINATING.value,
            reason="nothing here knows of it",
            kind=machine.kind,
            price=machine.price,
            lease=OVER.model_dump(),
            remote_id=machine.id,
            leased=began.asdict(),
            created=time.time(),
        )
        session.add(row)
        record(session, "machine.adopted", run_id=row.run_id, epoch=row.epoch, machine=row.key)
