"""The interface of a provider: create, find, list and terminate machines by this home's keys.

A key is derived from the machine's purpose, so a machine can be found again even if everything else is lost.
A provider's answer about a machine is PRESENT, ABSENT or UNKNOWN; without an answer it is UNKNOWN.
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

KEY_PREFIX = "perilune"


class ProviderUnreachableError(PeriluneError):
    """It is unknown which machines exist, and whether the request took effect."""


class NoCapacityError(PeriluneError):
    """Nothing was created, because no such machine is available now."""


class ProviderRefusedError(RequestError):
    """Nothing was created, and a retry is useless: credentials, a quota, or an unknown kind."""


@dataclass(frozen=True, slots=True)
class MachineKey:
    """The purpose of a machine: its name, its tag and the idempotency key of its creation.

    Attributes:
        cluster: name of the home that rents it.
    """

    cluster: str
    run_id: str
    epoch: int
    rank: int = 0

    def __str__(self) -> str:
        return f"{cluster_tag(self.cluster)}-{self.run_id.lower()}-{self.epoch}-{self.rank}"

    @classmethod
    def parse(cls, text: str) -> MachineKey | None:
        """Return the key in `text`, or None if it is not one of Perilune's."""
        match = re.fullmatch(rf"{KEY_PREFIX}-([0-9a-z]+)-([0-9a-z]+)-(\d+)-(\d+)", text)
        return match and cls(match[1], match[2].upper(), int(match[3]), int(match[4]))


def cluster_tag(cluster: str) -> str:
    """Return the tag of every machine that a home rents."""
    return f"{KEY_PREFIX}-{cluster}"


class MachineStatus(StrEnum):
    """Status of a machine according to its provider."""

    PENDING = "pending"  # accepted, and being created
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"  # final, and no longer billed


@dataclass(frozen=True, slots=True)
class RentedMachine:
    """A machine as listed by its provider.

    Attributes:
        key: text of its `MachineKey`.
        id: the provider's own name for it.
        price: currency units per hour.
        billed_seconds: time billed so far.
        notice_seconds: seconds until its announced preemption; None without an announcement.
        reason: why it is ending or ended: "terminated", "preempted", "host failure", "lifetime".
        address: where the other machines of the attempt reach it; "" while unknown.
        unseen: why the provider could not check the machine this time and repeats old data; else "".
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
    """An observation of one machine. PRESENT comes with the machine, UNKNOWN with the reason.

    A machine that has ended may be PRESENT with status ENDED, or ABSENT: both are evidence of its end.
    """

    presence: Presence
    machine: RentedMachine | None = None
    why: str = ""

    @classmethod
    def of(cls, machine: RentedMachine | None) -> Sighting:
        """Return the observation of a machine that the provider lists, or does not list."""
        if machine is None:
            return cls(Presence.ABSENT)
        return cls(Presence.UNKNOWN, why=machine.unseen) if machine.unseen else cls(Presence.PRESENT, machine)


@dataclass(frozen=True, slots=True)
class Offer:
    """A kind of machine that a provider offers.

    Attributes:
        price: currency units per hour.
        capacity: number still available now; None if the provider does not tell.
        preemptible: whether it may be preempted at any time.
    """

    kind: str
    price: float
    capacity: int | None
    preemptible: bool = False


@dataclass(frozen=True, slots=True)
class MachineRequest:
    """A request for a machine.

    Attributes:
        lifetime_seconds: time after which the provider terminates the machine by itself, if it can.
        nodes: machines of the attempt, one per rank. A provider that can create all of them or none does so
            when it is asked for any of them.
    """

    kind: str
    lifetime_seconds: float
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a provider.

    Attributes:
        visibility_seconds: longest time until the effect of a request is visible in its answers.
        keeps_files: whether files outlive a machine, so that an attempt's files have to be removed from it.
    """

    visibility_seconds: float
    keeps_files: bool = False


class Provider(Protocol):
    """A service that rents out machines. Every method may raise ProviderUnreachableError."""

    name: str
    capabilities: Capabilities

    def offers(self) -> Sequence[Offer]:
        """Return the kinds of machines with their prices."""

    def find(self, key: str) -> Sighting:
        """Look for one machine; never raises, an error is UNKNOWN."""

    def create(self, key: str, request: MachineRequest) -> RentedMachine:
        """Create the machine with this key, or return the existing one.

        Raises:
            ProviderUnreachableError: it may have been created, or may be created later.
            NoCapacityError: nothing was created.
            ProviderRefusedError: nothing was or will be created.
        """

    def list(self, tag: str) -> Sequence[RentedMachine]:
        """Return every machine whose key begins with `tag`, whoever requested it."""

    def terminate(self, key: str) -> None:
        """Terminate every machine with this key, if any. Acceptance of the request proves nothing."""

    def host(self, machine: RentedMachine) -> Host:
        """Return the host that runs commands on a machine."""
