"""The cost of rented machines: prices, the daily cap, and what each machine has cost and may still cost."""

import time
from collections.abc import Collection, Iterable
from typing import NamedTuple

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from perilune.control.machines.leases import Lease, Rental, compute_cost
from perilune.control.machines.providers import Providers
from perilune.control.record.clock import Instant
from perilune.control.record.store import EarlierUse, Machine
from perilune.control.record.transitions import MachineState
from perilune.execution.processes import boot_id
from perilune.execution.providers.protocol import ProviderRefusedError

DAY_S = 86400.0


def query_price(providers: Providers, rental: Rental) -> float:
    """Return the current price of a kind of machine, in currency units per hour.

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


def find_cap_problem(session: Session, cap: float, rental: Rental, price: float, nodes: int = 1) -> str:
    """Return why the daily cap forbids renting now, or "". It limits spent plus committed cost.

    Args:
        cap: currency units in any 24 hours.
        price: of one machine, per hour.
        nodes: number of machines to rent.
    """
    this_boot = Machine.leased["boot"].as_string() == boot_id()
    recent, alive = Machine.ended > time.time() - DAY_S, Machine.state != MachineState.GONE.value
    committed = cost_today(session.scalars(select(Machine).where(or_(this_boot, recent, alive))))
    more = nodes * compute_cost(price, rental.lease.max_seconds(price))
    if committed + more <= cap:
        return ""
    return f"{more:.4g} more would exceed the daily cap of {cap:.4g}: {committed:.4g} is spent or committed"


def cost_today(machines: Iterable[Machine]) -> float:
    """Return the cost of machines in the last 24 hours, plus what they may still cost."""
    now = Instant.now()
    return sum(_cost_last_day(machine, now) + remaining_cost(machine, now) for machine in machines)


def _cost_last_day(machine: Machine, now: Instant) -> float:
    age, spent = now.since(Instant(**machine.leased)), accrued_cost(machine, now)
    if machine.price <= 0:
        return 0.0
    ended = age - spent / machine.price * 3600.0  # seconds ago; 0 while it lives
    return compute_cost(machine.price, max(0.0, min(age, DAY_S) - ended))


def remaining_cost(machine: Machine, now: Instant | None = None) -> float:
    """Return the most that a machine may still cost within its lease."""
    if machine.state == MachineState.GONE:
        return 0.0
    return max(0.0, _lease_cost(machine) - accrued_cost(machine, now))


def lease_seconds(machine: Machine) -> float:
    """Return how long a machine may exist under its lease."""
    return Lease.model_validate(machine.lease).max_seconds(machine.price)


def lease_seconds_left(machine: Machine) -> float:
    """Return the seconds until the end of a machine's lease; negative after it."""
    return lease_seconds(machine) - Instant.now().since(Instant(**machine.leased))


def max_total_cost(machine: Machine) -> float:
    """Return the most that a machine may cost in all; its final cost once it is gone."""
    accrued = accrued_cost(machine)
    return accrued if machine.state == MachineState.GONE else max(_lease_cost(machine), accrued)


def _lease_cost(machine: Machine) -> float:
    return compute_cost(machine.price, lease_seconds(machine))


class MachineUse(NamedTuple):
    """An attempt's share of the cost of a machine, in currency units so far."""

    run_id: str
    epoch: int
    machine: Machine
    cost: float


def machine_uses(session: Session, runs: Collection[str] | None = None) -> list[MachineUse]:
    """Return the machines of these runs' attempts (None is all). A machine's uses add up to its cost."""
    earlier = select(EarlierUse, Machine).join(Machine, Machine.key == EarlierUse.machine_key)
    latest = select(Machine)
    if runs is not None:
        earlier = earlier.where(EarlierUse.run_id.in_(runs))
        latest = latest.where(Machine.run_id.in_(runs))
    uses = [MachineUse(use.run_id, use.epoch, machine, use.cost) for use, machine in session.execute(earlier)]
    shares = select(EarlierUse.machine_key, func.sum(EarlierUse.cost)).group_by(EarlierUse.machine_key)
    before = {row[0]: float(row[1]) for row in session.execute(shares)}
    for machine in session.scalars(latest):
        share = max(0.0, accrued_cost(machine) - before.get(machine.key, 0.0))
        uses.append(MachineUse(machine.run_id, machine.epoch, machine, share))
    return uses


def cost_of_runs(session: Session, runs: Collection[str]) -> float | None:
    """Return the cost of the machines rented for these runs; None if none were rented."""
    rented = machine_uses(session, runs)
    return sum(use.cost for use in rented) if rented else None


def accrued_cost(machine: Machine, now: Instant | None = None) -> float:
    """Return the upper bound of a machine's cost since its request; its final cost once it is gone."""
    if machine.state == MachineState.GONE:
        return machine.cost
    return compute_cost(machine.price, (now or Instant.now()).since(Instant(**machine.leased)))
