"""What a rented machine may cost: the bounds that every one of them is rented with."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Lease(BaseModel):
    """Bounds of one rented machine. It is ended at the first that is reached, whatever it is doing.

    Three enforce them, each without the others: the provider (where it ends machines by itself), the runner
    on the machine, and this control plane.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_lifetime: Annotated[float, Field(gt=0, description="seconds it may exist, from the request on")]
    idle: Annotated[
        float,
        Field(gt=0, description="seconds it may exist after its attempt has ended, collected or not"),
    ] = 600.0
    max_cost: Annotated[float, Field(gt=0, description="currency units it may cost at the offer's price")]
    ready_within: Annotated[
        float,
        Field(gt=0, description="seconds after the request when a machine that is not ready is given up"),
    ] = 900.0

    def seconds(self, price: float) -> float:
        """How long a machine of that price per hour may exist."""
        return min(self.max_lifetime, self.max_cost / price * 3600.0) if price > 0 else self.max_lifetime


def cost(price: float, seconds: float) -> float:
    """Currency units that `seconds` at `price` per hour cost."""
    return price * seconds / 3600.0


class Rental(BaseModel):
    """Which machine to rent for an attempt, and what it may cost: there is no renting without a lease."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    provider: Annotated[str, Field(description="a provider of providers.yaml in the home directory")]
    kind: Annotated[str, Field(description="type of machine, by the provider's name")]
    lease: Lease
