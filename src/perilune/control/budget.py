"""What machines cost: before one is rented, while it lives, and in all."""

from __future__ import annotations

import time
from collections.abc import Iterable

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from perilune.control.clock import Instant
from perilune.control.leases import Lease, Rental, cost
from perilune.control.providers import Providers
from perilune.control.store import Machine
from perilune.control.transitions import MachineState
from perilune.execution.processes import boot_id
from perilune.execution.providers.protocol import ProviderRefusedError

DAY = 86400.0


def price_of(providers: Providers, rental: Rental) -> float:
    """Currency units per hour that a kind of machine costs now.

    Raises:
        ProviderUnreachableError: its provider does not say.
        RequestError: there is no such provider, or no such kind.
    """
    offers = {offer.kind: offer for offer in providers.get(rental.provider).offers()}
    if rental.kind not in offers:
        raise ProviderRefusedError(
            f"provider '{rental.provider}' has no machine of kind '{rental.kind}'",
            remedy=f"one of {', '.join(sorted(offers))}",
        )
    return offers[rental.kind].price


def over_the_cap(session: Session, cap: float, rental: Rental, price: float, nodes: int = 1) -> str:
    """Why no more leases may be taken on now, or "". What is spent and promised must stay under the cap.

    Args:
        cap: currency units in any 24 hours.
        price: of a machine, per hour.
        nodes: machines that are wanted.
    """
    this_boot = Machine.leased["boot"].as_string() == boot_id()
    recent = select(Machine).where(or_(this_boot, Machine.created > time.time() - DAY))
    committed = today(session.scalars(recent))
    wanted = nodes * cost(price, rental.lease.seconds(price))
    if committed + wanted <= cap:
        return ""
    return f"{wanted:.4g} more would exceed the daily cap of {cap:.4g}: {committed:.4g} is spent or promised"


def today(machines: Iterable[Machine]) -> float:
    """What the machines of the last 24 hours have cost, or may cost in all."""
    now = Instant.now()
    return sum(promised(one) for one in machines if now.since(Instant.parse(one.leased)) < DAY)


def promised(machine: Machine) -> float:
    """What a machine may cost in all; what it did cost, once it is gone."""
    if machine.state == MachineState.GONE:
        return machine.cost
    return cost(machine.price, Lease.model_validate(machine.lease).seconds(machine.price))


def accrued(machine: Machine, now: Instant | None = None) -> float:
    """What a machine has cost so far at most, counted from the request; what it did cost, once it is gone."""
    if machine.state == MachineState.GONE:
        return machine.cost
    return cost(machine.price, (now or Instant.now()).since(Instant.parse(machine.leased)))
