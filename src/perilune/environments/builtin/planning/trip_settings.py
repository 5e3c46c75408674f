"""The dials of a trip."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TripDials(BaseModel):
    """What makes a trip hard to plan."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    places: int = Field(4, ge=1, le=26, description="places to choose from; beyond 10, OR-Tools is needed")
    visits: int = Field(2, ge=1, le=26, description="places that have to be visited, at least")
    must_see: int = Field(1, ge=0, le=26, description="of these, how many are prescribed")
    windows: int = Field(0, ge=0, le=26, description="of these, how many have a reserved time of entry")
    days: int = Field(1, ge=1, le=7, description="days, each of which begins and ends at home")
    length: int = Field(16, ge=6, le=30, description="steps of a day")
    slack: int = Field(
        3, ge=0, le=30, description="most steps that a place is open before, and after, a visit of it"
    )
    budget_slack: float = Field(
        0.25, ge=0, le=10, description="money left over, as a share of what the planted plan costs"
    )
    map: Literal["street", "plane"] = Field(
        "street", description="places in a row, or anywhere: ways along two axes add up"
    )
    effort: float = Field(
        2.0, gt=0, description="deterministic time of OR-Tools a task, beyond which a bound is kept"
    )
    style: Literal["compact", "words"] = Field(
        "compact", description="a few characters a place with the plan after ';', or English"
    )

    @model_validator(mode="after")
    def _possible(self) -> TripDials:
        if self.visits > self.places:
            raise ValueError(f"{self.visits} visits of {self.places} places: none is visited twice")
        if max(self.must_see, self.windows) > self.visits:
            raise ValueError("must_see and windows are at most visits")
        return self


class PlanningSpec(TripDials):
    """The environment section of a recipe, for `id: planning`."""

    id: Literal["planning"] = Field("planning", description="which environment this is")


class PlanningRepairSpec(TripDials):
    """The environment section of a recipe, for `id: planning_repair`."""

    id: Literal["planning_repair"] = Field("planning_repair", description="which environment this is")
    proposals: int = Field(3, ge=2, le=16, description="plans that may be proposed in an episode")
