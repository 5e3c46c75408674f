"""selfplay: `rl` in which some seats are taken by the policy as it was before, judged as it goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from perilune.bundle.job import Frozen, Job
from perilune.errors import RequestError
from perilune.tasks.rl.spec import RL, RLSpec

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace
    from perilune.environments.core.protocol import Environment
    from perilune.learn.trainer import Learner
    from perilune.rollout.worker import RolloutWorker
    from perilune.tasks.selfplay.league import League


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


class SelfPlay(RL):
    """Reinforcement learning in games of several players, against oneself now and before."""

    name = "selfplay"
    spec = SelfPlaySpec
    parallel = False
    called_off = False  # that all games are drawn is what some games come to

    def plan(self, job: Job) -> Mapping[str, object]:
        """As rl, with the league.

        Raises:
            RequestError: when the environment has one player, or not the ones to be judged against.
        """
        spec = SelfPlaySpec.model_validate(job.spec)
        check_players(job.environment, spec.league)
        league = spec.league
        return {
            **super().plan(job),
            "league": f"a member every {league.every} steps; {league.share:.0%} of tasks against one of the"
            f" newest {league.size}, the first and the champion, {league.choice}",
            "judged": f"in {league.games} games each, against"
            f" {', '.join((*league.against, 'the first', 'the champion'))}",
        }

    def league(self, workspace: Workspace, learner: Learner, rollouts: RolloutWorker) -> League:
        """The frozen policies of the stage, with a decoder and an engine of their own."""
        from perilune.engine.engine import Engine
        from perilune.games.exact_games import ExactGame
        from perilune.tasks.selfplay.judging import Judge
        from perilune.tasks.selfplay.league import League
        from perilune.tasks.selfplay.snapshots import Snapshots
        from perilune.tasks.stage.memory_plan import engine_room, planned_tokens
        from perilune.tasks.stage.policy import heldout_tasks, load_policy

        job = workspace.job
        spec = SelfPlaySpec.model_validate(job.spec)
        check_players(job.environment, spec.league)
        device = next(learner.decoder.parameters()).device
        frozen = load_policy(workspace, device, spec)
        longest = planned_tokens(job.environment, spec.max_tokens, frozen.decoder.config)
        engine = Engine(frozen.decoder, **engine_room(frozen.decoder.config, longest, device.type))
        judge = Judge(
            rollouts,
            job.environment,
            heldout_tasks(rollouts.environment, spec.league.games, job.seed),
            spec.params(frozen.stop_token_ids),
            ExactGame.of(rollouts.environment),
        )
        snapshots = Snapshots(workspace.checkpoints / "league", frozen.decoder, engine)
        return League(workspace, spec, learner, snapshots, judge)


def check_players(section: Mapping[str, Any], settings: LeagueSettings) -> None:
    """Refuse what has nobody to play against.

    Raises:
        RequestError: naming the key.
    """
    from perilune.environments.core.registry import make_environment

    environment: Environment = make_environment(section)
    if getattr(environment, "players", 1) < 2:
        raise RequestError(
            f"in {environment.id} the policy has one seat, and self-play needs two",
            where="environment",
            remedy="a game with `opponent: self`, or task: rl",
        )
    for name in settings.against:
        try:
            make_environment({**section, "opponent": name})
        except RequestError as error:
            raise RequestError(
                f"no player '{name}' to be judged against: {error.what}",
                where="league.against",
                remedy=error.remedy,
            ) from None


plugin = SelfPlay()
