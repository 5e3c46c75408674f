"""Instants by which leases are counted: seconds since boot, which no change of the wall clock touches."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from perilune.execution.processes import boot_id


@dataclass(frozen=True, slots=True)
class Instant:
    """A moment, as this machine counts.

    Attributes:
        boot: which boot of the machine.
        seconds: since that boot, time asleep included.
        wall: seconds of the wall clock, used only across boots.
    """

    boot: str
    seconds: float
    wall: float

    @classmethod
    def now(cls) -> Instant:
        """This moment."""
        return cls(boot_id(), boot_seconds(), time.time())

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> Instant:
        """Read back what `asdict` wrote."""
        return cls(str(fields["boot"]), float(fields["seconds"]), float(fields["wall"]))

    def asdict(self) -> dict[str, Any]:
        """As JSON-able fields."""
        return asdict(self)

    def since(self, earlier: Instant) -> float:
        """Seconds from `earlier` to here, never negative. Across a boot the wall clock is all there is."""
        if self.boot == earlier.boot:
            return max(0.0, self.seconds - earlier.seconds)
        return max(0.0, self.wall - earlier.wall)


def boot_seconds() -> float:
    """Seconds since boot, suspended time included."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
