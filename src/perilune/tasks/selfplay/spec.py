"""The fields of a selfplay stage."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from perilune.frozen import Frozen
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.stage.bounds import MAX_TASKS


class LeagueSettings(Frozen):
    """The fields of a selfplay stage's `league` section: its members and their evaluation."""

    every: int = Field(32, ge=1, description="steps between snapshots of the policy, which join the league")
    size: int = Field(
        8,
        ge=1,
        description="number of newest members to play against, besides the first member and the champion",
    )
    share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of tasks that the policy plays against a member; it plays the others against"
        " itself",
    )
    choice: Literal["uniform", "prioritised"] = Field(
        "prioritised", description="draw members uniformly, or prefer those that are hard to beat"
    )
    games: int = Field(64, ge=2, le=MAX_TASKS, description="games in each match that evaluates a new member")
    magnet: Literal["initial", "newest"] = Field(
        "initial",
        description="reference policy of `kl`. initial: the initial policy; newest: the newest member,"
        " which changes every league.every steps (magnetic mirror descent)",
    )
    against: tuple[str, ...] = Field(
        ("random",),
        description="values of the environment's key `opponent`; members are evaluated against these players",
    )


class SelfPlaySpec(RLSpec):
    """Fields of a selfplay stage."""

    steps: int = Field(256, ge=1, description="training steps; each plays a batch of games")
    prompts: int = Field(8, ge=1, le=MAX_TASKS, description="tasks per step")
    league: LeagueSettings = Field(LeagueSettings(), description="earlier policies to play against")

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        if self.asynchronous is not None:
            yield "selfplay cannot sample asynchronously against a league yet. Remove asynchronous"
        if self.server is not None:
            yield "selfplay samples several policies, which a server cannot do yet. Remove engine"
        if self.league.magnet == "newest" and not self.kl:
            yield (
                "league.magnet is newest, and kl is 0, so nothing uses the magnet. Set kl to 0.2, for example"
            )
        if self.league.magnet == "newest" and (self.lora is not None or "deviation" in self.algorithm.needs):
            yield (
                "league.magnet: newest replaces the reference policy during training. This works neither with"
                " lora nor with an algorithm that measures the distance to the initial policy. Set"
                " league.magnet: initial"
            )
        if self.keep.best is not None:
            yield "selfplay outputs the champion, which the league chooses. Remove keep.best"
        if self.eval is not None:
            yield (
                "selfplay evaluates by matches. Remove eval, and set league.every, league.games and"
                " league.against"
            )
