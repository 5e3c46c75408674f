"""Settings of generated trips."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from perilune.frozen import Frozen


class TripSettings(Frozen):
    """The settings that determine how hard a trip is to plan."""

    places: int = Field(4, ge=1, le=26, description="places to choose from; more than 10 need OR-Tools")
    visits: int = Field(2, ge=1, le=26, description="minimum number of places to visit")
    must_see: int = Field(
        1, ge=0, le=26, description="number of places that every valid plan must visit; at most `visits`"
    )
    windows: int = Field(
        0, ge=0, le=26, description="number of places with a reserved entry time; at most `visits`"
    )
    days: int = Field(1, ge=1, le=7, description="days, each of which starts and ends at home")
    length: int = Field(16, ge=6, le=30, description="time steps per day")
    slack: int = Field(
        3,
        ge=0,
        le=30,
        description="maximum time steps that a place is open before and after its visit in the plan"
        " around which the trip is built",
    )
    budget_slack: float = Field(
        0.25,
        ge=0,
        le=10,
        description="difference between the budget and the cost of the plan around which the trip is"
        " built, as a share of that cost",
    )
    map: Literal["street", "plane"] = Field(
        "street",
        description="street: all places lie on a line; plane: places lie in two dimensions, with"
        " Manhattan distances",
    )
    effort: float = Field(
        2.0,
        gt=0,
        description="time limit of OR-Tools per task, in its deterministic time units (about seconds)",
    )
    style: Literal["compact", "words"] = Field(
        "compact", description="compact: a few characters per place, plan after ';'; words: English"
    )

    @model_validator(mode="after")
    def _check_possible(self) -> TripSettings:
        if self.visits > self.places:
            raise ValueError(f"visits is {self.visits}, but there are only {self.places} places")
        if max(self.must_see, self.windows) > self.visits:
            raise ValueError("must_see and windows must not exceed visits")
        return self


class PlanningSpec(TripSettings):
    """The environment section of a recipe, for `id: planning`."""

    id: Literal["planning"] = Field("planning", description="id of the environment")


class PlanningRepairSpec(TripSettings):
    """The environment section of a recipe, for `id: planning_repair`."""

    id: Literal["planning_repair"] = Field("planning_repair", description="id of the environment")
    proposals: int = Field(3, ge=2, le=16, description="maximum proposals in an episode")
