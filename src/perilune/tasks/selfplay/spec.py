"""The fields of a selfplay stage."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perilune.bundle.job import Frozen
from perilune.tasks.rl.spec import RLSpec


class LeagueSettings(Frozen):
    """The league: who is in it, how often it is met, and how its members are judged."""

    every: int = Field(32, ge=1, description="steps after which the policy is frozen into the league")
    size: int = Field(
        8, ge=1, description="newest members that are played, beside the first and the champion"
    )
    share: float = Field(0.5, ge=0, le=1, description="of the tasks that are played against a member")
    choice: Literal["uniform", "prioritised"] = Field(
        "prioritised", description="which member: any, or rather one that is hard to beat"
    )
    games: int = Field(64, ge=2, description="of a match by which a member is judged")
    against: tuple[str, ...] = Field(
        ("random",), description="players of the environment (its `opponent`) that members are judged against"
    )


class SelfPlaySpec(RLSpec):
    """Fields of a selfplay stage."""

    steps: int = Field(256, ge=1, description="batches of games, played and learned from")
    prompts: int = Field(8, ge=1, description="tasks a step")
    league: LeagueSettings = Field(LeagueSettings(), description="frozen policies that are played against")
