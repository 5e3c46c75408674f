"""Time limits of an attempt: how long it may run on its machine, and when it counts as lost."""

from __future__ import annotations

from pydantic import Field, model_validator

from perilune.execution.worker import STOP_GRACE_S
from perilune.frozen import Frozen

DAY_S = 86_400.0
STOP_MARGIN_S = 60.0  # seconds that an attempt needs after STOP_GRACE_S until it is proven to have stopped


class AttemptLimits(Frozen):
    """Time limits of an attempt on another machine, counted by monotonic clocks.

    An attempt must have stopped before it is abandoned, so that two attempts never run at once. Its own
    machine enforces that, without contact to this one.
    """

    max_lifetime: float = Field(
        7 * DAY_S,
        gt=0,
        le=3650 * DAY_S,
        description="seconds after which an attempt is stopped; `placement.lease.max_lifetime` limits a"
        " machine",
    )
    on_box_stop_after: float | None = Field(
        None,
        gt=0,
        description="seconds without contact after which an attempt stops itself, to continue later from its"
        " last checkpoint; by default it keeps running, for example while a laptop is closed",
    )
    lost_after: float | None = Field(
        None,
        gt=0,
        description="seconds without contact after which an attempt is abandoned and another starts; by"
        " default 70 more than the shorter of max_lifetime and on_box_stop_after, because by then the attempt"
        " has certainly stopped itself",
    )

    @property
    def silent_after(self) -> float:
        """Seconds out of contact after which an attempt has certainly stopped."""
        return (
            min(self.max_lifetime, self.on_box_stop_after or self.max_lifetime) + STOP_GRACE_S + STOP_MARGIN_S
        )

    @property
    def given_up_after(self) -> float:
        """Seconds out of contact after which an attempt is abandoned and another starts."""
        return self.lost_after or self.silent_after

    @model_validator(mode="after")
    def _silent_first(self) -> AttemptLimits:
        if self.lost_after is not None and self.lost_after < self.silent_after:
            raise ValueError(
                f"lost_after must be at least {self.silent_after:.0f}, because the old attempt may run until"
                " then; set on_box_stop_after to make it stop itself earlier"
            )
        return self
