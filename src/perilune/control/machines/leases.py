"""Leases: the limits on lifetime and cost of every rented machine."""

from typing import Annotated

from pydantic import Field

from perilune.frozen import Frozen


class Lease(Frozen):
    """Limits of a rented machine. The machine is terminated when it reaches the first, whatever it is doing.

    Three parties enforce them independently: the provider (if it can), the runner on the machine, and this
    control plane.
    """

    max_lifetime: Annotated[
        float,
        Field(gt=0, description="maximum lifetime of a machine in seconds, counted from the request"),
    ]
    idle: Annotated[
        float,
        Field(gt=0, description="seconds after which a machine that no attempt needs is terminated"),
    ] = 600.0
    max_cost: Annotated[
        float,
        Field(gt=0, description="maximum cost of a machine in currency units, at the provider's price"),
    ]
    ready_within: Annotated[
        float,
        Field(
            gt=0, description="a machine that is not ready this many seconds after the request is terminated"
        ),
    ] = 900.0

    def max_seconds(self, price: float) -> float:
        """Return how long a machine may exist at this price per hour."""
        return min(self.max_lifetime, self.max_cost / price * 3600.0) if price > 0 else self.max_lifetime


def compute_cost(price: float, seconds: float) -> float:
    """Return the cost of `seconds` at `price` per hour, in currency units."""
    return price * seconds / 3600.0


class Rental(Frozen):
    """The kind of machine to rent for an attempt, and its lease."""

    provider: Annotated[str, Field(description="name of a provider in providers.yaml, in the home directory")]
    kind: Annotated[str, Field(description="the provider's name for the machine type")]
    lease: Lease
