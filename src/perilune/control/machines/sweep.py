"""Find and terminate machines with this home's tag that are not in its record."""

import time

from perilune.control.machines.leases import Lease
from perilune.control.machines.lifecycle import Fleet
from perilune.control.record.clock import Instant
from perilune.control.record.store import Machine, record_event
from perilune.control.record.transitions import MachineState
from perilune.execution.providers.protocol import MachineKey, MachineStatus, RentedMachine

SWEEP_INTERVAL_S = 60.0
UNRECORDED_GRACE_S = 120.0  # billed time after which an unrecorded machine is terminated
EXPIRED_LEASE = Lease(max_lifetime=1.0, idle=1.0, max_cost=1e-9, ready_within=1.0)  # of an unrecorded machine


def terminate_unrecorded(fleet: Fleet, grace: float = UNRECORDED_GRACE_S) -> list[str]:
    """Terminate listed machines that are unrecorded or recorded as gone; returns their keys.

    An unrecorded machine is left alone until its provider has billed `grace` seconds.
    """
    terminated = []
    for provider in fleet.providers.names():
        listing = fleet.listings.get(provider, fresh=True)
        for machine in (listing.machines or {}).values():
            if machine.status is MachineStatus.ENDED:
                continue
            recorded = fleet.machine(machine.key)
            if recorded is not None and recorded.state != MachineState.GONE:
                continue
            if recorded is None:
                if machine.billed_seconds < grace:
                    continue
                _record_expired(fleet, provider, machine, listing.time)
            terminated.append(machine.key)
            fleet.reconcile(machine.key)
    return terminated


def _record_expired(fleet: Fleet, provider: str, machine: RentedMachine, now: Instant) -> None:
    """Record an unrecorded machine with an expired lease, so that reconciling terminates it."""
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
            reason="it is not in this home's database",
            kind=machine.kind,
            price=machine.price,
            lease=EXPIRED_LEASE.model_dump(),
            remote_id=machine.id,
            leased=began._asdict(),
            created=time.time(),
        )
        session.add(row)
        record_event(session, "machine.adopted", run_id=row.run_id, epoch=row.epoch, machine=row.key)
