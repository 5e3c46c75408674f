"""How long an attempt may go on where it runs, and when it is given up from here."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from perilune.execution.worker import STOP_GRACE

DAY = 86_400.0
MARGIN = 60.0  # seconds in which an attempt that is stopped has proven to be


class AttemptLimits(BaseModel):
    """Bounds of an attempt on another machine, all counted by clocks that nobody can set.

    The one rule: an attempt has fallen silent before it is given up, so that two never work at once. What
    makes it fall silent is on its machine, and needs no word from here.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_lifetime: float = Field(7 * DAY, gt=0, description="seconds after which an attempt is stopped there")
    on_box_stop_after: float | None = Field(
        None,
        gt=0,
        description="seconds without a look from here after which an attempt stops itself, to continue later"
        " from its last checkpoint; by default it keeps working, as when a laptop is closed",
    )
    lost_after: float | None = Field(
        None,
        gt=0,
        description="seconds out of sight after which an attempt is given up and another starts; by default"
        " as soon as it must have stopped",
    )

    @property
    def silent_after(self) -> float:
        """Seconds out of sight after which an attempt has surely stopped."""
        return min(self.max_lifetime, self.on_box_stop_after or self.max_lifetime) + STOP_GRACE + MARGIN

    @property
    def given_up_after(self) -> float:
        """`lost_after`, or what it is by default."""
        return self.lost_after or self.silent_after

    @model_validator(mode="after")
    def _silent_first(self) -> AttemptLimits:
        if self.lost_after is not None and self.lost_after < self.silent_after:
            raise ValueError(
                f"lost_after must be at least {self.silent_after:.0f}: until then the old attempt may still"
                " run; set on_box_stop_after to have it stop itself earlier"
            )
        return self
