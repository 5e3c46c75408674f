"""The settings of SkyPilot in providers.yaml: machines, their highest prices, and the interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from perilune.frozen import Frozen

# Keys that Perilune sets itself or does not support, with the reason.
OURS = {
    "autostop": "the lease sets it",
    "hooks": "only Perilune's runner runs there",
    "max_hourly_cost": "`price` sets it",
}
KindName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


class Kind(Frozen):
    """A kind of machine."""

    resources: Annotated[
        Mapping[str, Any],
        Field(description="as under `resources` in SkyPilot's YAML: infra, accelerators, ..."),
    ]
    price: Annotated[
        float | None,
        Field(
            gt=0,
            description="highest price of a machine per hour; by default the price in SkyPilot's catalog",
        ),
    ] = None

    @field_validator("resources")
    @classmethod
    def _only_theirs(cls, resources: Mapping[str, Any]) -> Mapping[str, Any]:
        for key, reason in OURS.items():
            if key in resources:
                raise ValueError(f"'{key}' cannot be set here: {reason}")
        return resources

    @property
    def preemptible(self) -> bool:
        """True if its cloud may preempt it."""
        choices = [*self.resources.get("any_of", ()), *self.resources.get("ordered", ())]
        return any(bool(choice.get("use_spot")) for choice in (self.resources, *choices))


class SkyPilotSettings(Frozen):
    """Any cloud that SkyPilot supports."""

    type: Literal["skypilot"]
    python: Annotated[
        str | None,
        Field(description="the interpreter that has SkyPilot; by default that of `sky` on the PATH"),
    ] = None
    kinds: Annotated[Mapping[KindName, Kind], Field(min_length=1, description="machines by name")]
    look_seconds: Annotated[
        float,
        Field(ge=0, description="seconds for which an answer of the clouds is reused"),
    ] = 15.0
    visibility_seconds: Annotated[
        float, Field(ge=0, description="seconds after which operations are visible in answers")
    ] = 60.0

    @model_validator(mode="after")
    def _looks_are_fresh(self) -> SkyPilotSettings:
        if self.visibility_seconds < 3 * self.look_seconds:
            raise ValueError("visibility_seconds must be at least three times look_seconds")
        return self
