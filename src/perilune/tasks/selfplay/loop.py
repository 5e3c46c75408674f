"""The loop of selfplay: the RL loop, with a league of earlier policies as opponents."""

from typing import Any

from perilune.bundle.workspace import Workspace
from perilune.games.exact_games import ExactGame
from perilune.learn.trainer import Learner
from perilune.tasks.rl.loop import run as run_rl
from perilune.tasks.selfplay.league import League
from perilune.tasks.selfplay.matches import MatchEvaluator
from perilune.tasks.selfplay.snapshots import Snapshots
from perilune.tasks.selfplay.spec import SelfPlaySpec
from perilune.tasks.stage.memory_plan import make_engine
from perilune.tasks.stage.player import Player
from perilune.tasks.stage.policy import heldout_tasks, load_policy


def run(workspace: Workspace, spec: SelfPlaySpec) -> dict[str, Any]:
    """Train the policy and return the stage's summary."""

    def make_league(player: Player, learner: Learner) -> League:
        job = workspace.job
        frozen = load_policy(workspace, player.device, spec)
        engine = make_engine(frozen.decoder, player.max_episode_tokens, frozen.tokenizer)
        evaluator = MatchEvaluator(
            player.rollouts,
            job.environment,
            heldout_tasks(player.environment, spec.league.games, job.seed),
            spec.params(frozen.stop_token_ids),
            ExactGame.from_environment(player.environment),
        )
        snapshots = Snapshots(workspace.checkpoints / "league", frozen.decoder, engine)
        return League(workspace, spec, learner, snapshots, evaluator)

    # In some games every match is a draw, so equal rewards must not stop the run.
    return run_rl(workspace, spec, make_league, stop_without_signal=False)
