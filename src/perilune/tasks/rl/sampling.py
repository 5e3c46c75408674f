"""The rollout side of reinforcement learning: tasks in, finished groups out.

The learner side (`perilune.tasks.rl.update`) takes nothing from here but groups of `Episode`, whose tokens
carry the version of the weights that sampled them. Weights come the other way, through `Publisher`.
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
    """Yields the groups of each step, with process rewards where the spec asks for them.

    Args:
        rollouts: plays the episodes; the player's own, or one with opponents.
        taken: training tasks that earlier attempts have used.
    """

    def __init__(self, spec: RLSpec, player: Player, rollouts: RolloutWorker, taken: int) -> None:
        self._spec, self._player = spec, player
        self._tasks = player.training_tasks(skip=taken)
        self._process_rewards = ProcessRewards(
            spec.process_rewards, player.policy.decoder, rollouts, spec, spec.token_budget
        )

    @property
    def taken(self) -> int:
        """Training tasks used so far, by earlier attempts too."""
        return self._tasks.taken

    @property
    def epoch(self) -> int:
        """How often every training task had been used before the latest one."""
        return self._tasks.epoch

    def sample(self, step: int, watch: Stopwatch) -> Groups:
        """Play the groups of a step (from 1); dead groups are refilled where the algorithm asks for it.

        Raises:
            WorkFailedError: when sampling fails, or a task comes twice within an epoch.
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
