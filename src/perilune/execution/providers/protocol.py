"""What the control plane asks of whoever rents out machines: make, find, list and end them, all by our key.

A key is derived from what the machine is for, so that a machine can be found again by whoever has forgotten
everything else. What a provider says is an observation with three values; only an answer counts as one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from perilune.errors import PeriluneError, RequestError
from perilune.execution.hosts.protocol import Host
from perilune.execution.processes import Presence

PREFIX = "perilune"


class ProviderUnreachableError(PeriluneError):
    """Nothing is known: neither what there is, nor whether what was asked for has happened."""


class NoCapacityError(PeriluneError):
    """Nothing was made: no such machine is to be had now."""


class ProviderRefusedError(RequestError):
    """Nothing was made, and asking again is vain: credentials, a quota, or a kind that does not exist."""


@dataclass(frozen=True, slots=True)
class MachineKey:
    """Whom a machine is for; its name, its tag and its creation's idempotency key in one.

    Attributes:
        cluster: the home that rents it.
        run_id, epoch, rank: the process it is to carry.
    """

    cluster: str
    run_id: str
    epoch: int
    rank: int = 0

    def __str__(self) -> str:
        return f"{tag_of(self.cluster)}-{self.run_id.lower()}-{self.epoch}-{self.rank}"

    @classmethod
    def parse(cls, text: str) -> MachineKey | None:
        """The key that `text` is, or None when it is none of ours."""
        match = re.fullmatch(rf"{PREFIX}-([0-9a-z]+)-([0-9a-z]+)-(\d+)-(\d+)", text)
        return match and cls(match[1], match[2].upper(), int(match[3]), int(match[4]))


def tag_of(cluster: str) -> str:
    """What every machine rented by a home is marked with."""
    return f"{PREFIX}-{cluster}"


class MachineStatus(StrEnum):
    """What a provider says of a machine."""

    PENDING = "pending"  # accepted, and being made
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"  # costs nothing any more, and never comes back


@dataclass(frozen=True, slots=True)
class RentedMachine:
    """A machine as its provider tells of it.

    Attributes:
        key: text of its `MachineKey`.
        id: the provider's own name of it.
        kind: of the offer.
        price: currency units per hour.
        status: as told.
        billed_seconds: how long it has cost money so far.
        notice_seconds: it will be taken away in so many seconds; None when nobody has said so.
        reason: why it is ending or ended: "terminated", "preempted", "host failure", "lifetime".
        address: where the other machines of the same attempt reach it; "" while that is not known.
        unseen: why its provider could not look this time: what it tells is what it told before; else "".
    """

    key: str
    id: str
    kind: str
    price: float
    status: MachineStatus
    billed_seconds: float
    notice_seconds: float | None = None
    reason: str = ""
    address: str = ""
    unseen: str = ""


@dataclass(frozen=True, slots=True)
class Sighting:
    """One look for one machine. PRESENT comes with what was seen; UNKNOWN with why.

    A machine that has ended may be PRESENT with status ENDED, or ABSENT: both are evidence.
    """

    presence: Presence
    machine: RentedMachine | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """A kind of machine that can be had.

    Attributes:
        kind: its name.
        price: currency units per hour.
        capacity: how many more can be had now; None when the provider does not tell.
        preemptible: whether it may be taken away at any time.
    """

    kind: str
    price: float
    capacity: int | None
    preemptible: bool = False


@dataclass(frozen=True, slots=True)
class MachineRequest:
    """What is asked for.

    Attributes:
        kind: of an offer.
        lifetime_seconds: after which the provider is to end the machine by itself, where it can.
        nodes: machines that the attempt has, one a rank. A provider that can make them together, or none of
            them, does so when it is asked for any of them.
    """

    kind: str
    lifetime_seconds: float
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a provider declares, so that nobody has to guess.

    Attributes:
        ends_by_itself: whether it honours `lifetime_seconds`.
        announces: whether it gives notice before it takes a machine away.
        visibility_seconds: how long what it has done may stay out of sight.
        keeps_files: whether a machine's files outlive it, so that an attempt's have to be removed from it.
    """

    ends_by_itself: bool
    announces: bool
    visibility_seconds: float
    keeps_files: bool = False


class Provider(Protocol):
    """Who rents out machines. Every method may raise ProviderUnreachableError, and says nothing then."""

    name: str
    capabilities: Capabilities

    def offers(self) -> Sequence[Offer]:
        """What can be had, and for how much."""
        ...

    def find(self, key: str) -> Sighting:
        """Look for one machine; never raises, an error is UNKNOWN."""
        ...

    def create(self, key: str, request: MachineRequest) -> RentedMachine:
        """Make the machine called `key`, or tell of the one that is called so already.

        Raises:
            ProviderUnreachableError: it may have been made, or be made yet.
            NoCapacityError: nothing was made.
            ProviderRefusedError: nothing was made, nor will be.
        """
        ...

    def list(self, tag: str) -> Sequence[RentedMachine]:
        """Every machine whose key begins with `tag`, whoever asked for it."""
        ...

    def terminate(self, key: str) -> None:
        """End every machine called `key`; none is fine. That it was accepted proves nothing."""
        ...

    def host(self, machine: RentedMachine) -> Host:
        """How commands are run on it."""
        ...
