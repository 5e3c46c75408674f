"""The cost of rented machines: prices, the daily cap, and what each machine has cost and may still cost."""

import time
from collections.abc import Collection, Iterable
from typing import NamedTuple

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from perilune.control.machines.leases import Lease, Rental, cost
from perilune.control.machines.providers import Providers
from perilune.control.record.clock import Instant
from perilune.control.record.store import EarlierUse, Machine
from perilune.control.record.transitions import MachineState
from perilune.execution.processes import boot_id
from perilune.execution.providers.protocol import ProviderRefusedError

DAY = 86400.0


def price_of(providers: Providers, rental: Rental) -> float:
    """Current price of a kind of machine, in currency units per hour.

    Raises:
        ProviderUnreachableError: the provider does not answer.
        RequestError: there is no such provider or kind.
    """
    offers = {offer.kind: offer for offer in providers.get(rental.provider).offers()}
    if rental.kind not in offers:
        raise ProviderRefusedError(
            f"provider '{rental.provider}' has no machine of kind '{rental.kind}'",
            remedy=f"one of {', '.join(sorted(offers))}",
        )
    return offers[rental.kind].price


def over_the_cap(session: Session, cap: float, rental: Rental, price: float, nodes: int = 1) -> str:
    """Why no more machines may be rented now, or "". Spent and committed cost must stay under the cap.

    Args:
        cap: currency units in any 24 hours.
        price: of one machine, per hour.
        nodes: number of machines to rent.
    """
    this_boot = Machine.leased["boot"].as_string() == boot_id()
    recent, alive = Machine.ended > time.time() - DAY, Machine.state != MachineState.GONE.value
    committed = today(session.scalars(select(Machine).where(or_(this_boot, recent, alive))))
    more = nodes * cost(price, rental.lease.seconds(price))
    if committed + more <= cap:
        return ""
    return f"{more:.4g} more would exceed the daily cap of {cap:.4g}: {committed:.4g} is spent or committed"


def today(machines: Iterable[Machine]) -> float:
    """What machines have cost in the last 24 hours, plus what they may still cost."""
    now = Instant.now()
    return sum(_in_the_last_day(one, now) + to_come(one, now) for one in machines)


def _in_the_last_day(machine: Machine, now: Instant) -> float:
    """What a machine has cost in the last 24 hours."""
    age, spent = now.since(Instant.parse(machine.leased)), accrued(machine, now)
    if machine.price <= 0:
        return 0.0
    ended = age - spent / machine.price * 3600.0  # seconds ago; 0 while it lives
    return cost(machine.price, max(0.0, min(age, DAY) - ended))


def to_come(machine: Machine, now: Instant | None = None) -> float:
    """What a machine may still cost within its lease. Cost beyond the lease counts only in `accrued`."""
    if machine.state == MachineState.GONE:
        return 0.0
    return max(0.0, _leased(machine) - accrued(machine, now))


def lease_seconds(machine: Machine) -> float:
    """How long a machine may exist under its lease."""
    return Lease.model_validate(machine.lease).seconds(machine.price)


def lease_left(machine: Machine) -> float:
    """Seconds until the end of a machine's lease; negative after it."""
    return lease_seconds(machine) - Instant.now().since(Instant.parse(machine.leased))


def promised(machine: Machine) -> float:
    """The most that a machine may cost in all; its final cost once it is gone."""
    return accrued(machine) if machine.state == MachineState.GONE else max(_leased(machine), accrued(machine))


def _leased(machine: Machine) -> float:
    return cost(machine.price, lease_seconds(machine))


class Use(NamedTuple):
    """An attempt's share of the cost of a machine, in currency units so far."""

    run_id: str
    epoch: int
    machine: Machine
    cost: float


def uses(session: Session, runs: Collection[str] | None = None) -> list[Use]:
    """Which attempts of these runs (None is all) had which machines. The costs of a machine's uses add up."""
    earlier = select(EarlierUse, Machine).join(Machine, Machine.key == EarlierUse.machine_key)
    latest = select(Machine)
    if runs is not None:
        earlier = earlier.where(EarlierUse.run_id.in_(runs))
        latest = latest.where(Machine.run_id.in_(runs))
    found = [Use(one.run_id, one.epoch, machine, one.cost) for one, machine in session.execute(earlier)]
    shares = select(EarlierUse.machine_key, func.sum(EarlierUse.cost)).group_by(EarlierUse.machine_key)
    before = {row[0]: float(row[1]) for row in session.execute(shares)}
    for machine in session.scalars(latest):
        share = max(0.0, accrued(machine) - before.get(machine.key, 0.0))
        found.append(Use(machine.run_id, machine.epoch, machine, share))
    return found


def cost_of_runs(session: Session, runs: Collection[str]) -> float | None:
    """What the rented machines of these runs have cost; None if nothing was rented for them."""
    rented = uses(session, runs)
    return sum(one.cost for one in rented) if rented else None


def accrued(machine: Machine, now: Instant | None = None) -> float:
    """Upper bound of a machine's cost so far, counted from its request; its final cost once it is gone."""
    if machine.state == MachineState.GONE:
        return machine.cost
    return cost(machine.price, (now or Instant.now()).since(Instant.parse(machine.leased)))
