"""selfplay: `rl` in games in which earlier versions of the policy play a share of the opponents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from perilune.bundle.job import Job
from perilune.environments.core.registry import make_environment
from perilune.errors import RequestError
from perilune.tasks.rl.stage import ReinforcementStage
from perilune.tasks.selfplay.spec import LeagueSettings, SelfPlaySpec

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace


class SelfPlay(ReinforcementStage[SelfPlaySpec]):
    """Reinforcement learning in games of several players, against current and earlier policies."""

    name = "selfplay"
    spec = SelfPlaySpec

    def describe(self, spec: SelfPlaySpec, job: Job) -> Mapping[str, object]:
        """Return the plan of rl, with the league.

        Raises:
            RequestError: when the environment has one player, or lacks a player in `league.against`.
        """
        check_players(job.environment, spec.league)
        league = spec.league
        return {
            **super().describe(spec, job),
            "league": f"a member every {league.every} steps; {league.share:.0%} of tasks against one of the"
            f" newest {league.size}, the first and the champion, {league.choice}",
            "judged": f"in {league.games} games against each of"
            f" {', '.join((*league.against, 'the first', 'the champion'))}",
        }

    def execute(self, spec: SelfPlaySpec, workspace: Workspace) -> dict[str, Any]:
        """Train the policy, and evaluate the members of the league."""
        from perilune.tasks.selfplay.loop import run

        check_players(workspace.job.environment, spec.league)
        return run(workspace, spec)


def check_players(section: Mapping[str, Any], settings: LeagueSettings) -> None:
    """Check that the environment has several players, and the players in `league.against`.

    Raises:
        RequestError: when the environment has one player, or lacks a player in `league.against`.
    """
    environment = make_environment(section)
    if getattr(environment, "players", 1) < 2:
        raise RequestError(
            f"{environment.id} has one player, but selfplay needs at least two",
            where="environment",
            remedy="use a game with `opponent: self`, or task: rl",
        )
    for name in settings.against:
        try:
            make_environment({**section, "opponent": name})
        except RequestError as error:
            raise RequestError(
                f"the environment has no player '{name}': {error.what}",
                where="league.against",
                remedy=error.remedy,
            ) from None


plugin = SelfPlay()
