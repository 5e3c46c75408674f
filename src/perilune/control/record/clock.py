"""The clock of leases: seconds since boot, which changes of the wall clock do not affect."""

from __future__ import annotations

import time
from typing import NamedTuple

from perilune.execution.processes import boot_id


class Instant(NamedTuple):
    """A moment on this machine's clock.

    Attributes:
        boot: identifies the boot of the machine.
        seconds: since that boot, including time in suspend.
        wall: Unix time in seconds, used only between different boots.
    """

    boot: str
    seconds: float
    wall: float

    @classmethod
    def now(cls) -> Instant:
        return cls(boot_id(), boot_seconds(), time.time())

    def since(self, earlier: Instant) -> float:
        """Return the seconds since `earlier`, at least 0. After a reboot the wall clock decides."""
        if self.boot == earlier.boot:
            return max(0.0, self.seconds - earlier.seconds)
        return max(0.0, self.wall - earlier.wall)


def boot_seconds() -> float:
    """Return the seconds since boot, including time in suspend."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
