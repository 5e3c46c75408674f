"""The rollout side of reinforcement learning: from tasks to finished groups.

The learner side (`perilune.tasks.rl.update`) receives only groups of `Episode`, whose tokens carry the
version of the weights that sampled them. Weights travel the other way, through `Publisher`.
"""

from __future__ import annotations

from perilune.rollout.dynamic_sampling import play_until_live
from perilune.rollout.groups import Groups
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import RolloutWorker
from perilune.tasks.process_rewards.rewards import ProcessRewards
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.stage.player import Player


class GroupSampler:
    """Samples the groups of each step, with process rewards if the spec has them.

    Args:
        rollouts: samples the episodes, possibly with opponents.
        taken: number of training tasks that earlier attempts have used.
    """

    def __init__(self, spec: RLSpec, player: Player, rollouts: RolloutWorker, taken: int) -> None:
        self._spec, self._player = spec, player
        self._tasks = player.training_tasks(skip=taken)
        self._process_rewards = ProcessRewards(
            spec.process_rewards, player.policy.decoder, rollouts, spec, spec.token_budget
        )

    @property
    def taken(self) -> int:
        """Number of training tasks used so far, with those of earlier attempts."""
        return self._tasks.taken

    @property
    def epoch(self) -> int:
        """Number of completed epochs of the training tasks."""
        return self._tasks.epoch

    def sample(self, step: int, watch: Stopwatch) -> Groups:
        """Sample the groups of a step (from 1), and refill dead groups if the algorithm does so.

        Raises:
            WorkFailedError: when sampling fails, or a task repeats within an epoch.
        """
        spec, player = self._spec, self._player

        def play(count: int, first: int) -> Groups:
            return self._process_rewards.play(
                self._tasks.take(count),
                samples=spec.samples,
                params=spec.params(player.policy.stop_token_ids),
                step=step,
                watch=watch,
                first=first,
            )

        groups = play_until_live(play, spec.prompts, spec.algorithm.refills)
        self._tasks.check(groups, step)
        return groups
