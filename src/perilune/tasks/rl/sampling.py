"""The rollout side of reinforcement learning: from tasks to finished groups.

The learner side (`perilune.tasks.rl.update`) receives only groups of `Episode`, whose tokens carry the
version of the weights that sampled them. Weights travel the other way, through `Publisher`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from perilune.rollout.dynamic_sampling import play_until_live
from perilune.rollout.groups import Groups
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import RolloutWorker
from perilune.tasks.process_rewards.rewards import ProcessRewards
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.rl.task_sampler import DrawnTask, TaskSampler
from perilune.tasks.stage.player import Player


class GroupSource(ABC):
    """A source of the groups to train on.

    Attributes:
        versions: checksums of the weights that sampled groups in an earlier attempt, by policy version.
    """

    versions: Mapping[int, str] = {}

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Number of epochs of the training tasks that are completed."""

    @abstractmethod
    def sample(self, step: int, watch: Stopwatch) -> Groups:
        """Return the groups of a step (counted from 1).

        Raises:
            WorkFailedError: when sampling fails, or a task repeats within an epoch.
        """

    def metrics(self, groups: Groups) -> Mapping[str, float]:
        """Return reproducible metrics of the groups, for metrics.jsonl."""
        return {}

    def timings(self) -> Mapping[str, float]:
        """Return timings of the last step, for timings.jsonl."""
        return {}

    def save_progress(self) -> None:  # noqa: B027 - optional
        """Store the state for a resumed run in the learner's memory; called before each checkpoint."""

    def close(self) -> None:  # noqa: B027
        """Release processes and files."""


class GroupSampler(GroupSource):
    """Samples the groups of each step, with process rewards if the spec has them.

    Args:
        rollouts: samples the episodes, possibly with opponents.
        memory: the learner's memory; keeps the position in the training tasks and the curriculum's counts.
    """

    def __init__(self, spec: RLSpec, player: Player, rollouts: RolloutWorker, memory: dict[str, Any]) -> None:
        self._spec, self._player = spec, player
        self._tasks = TaskSampler(spec.curriculum, player, memory)
        self._process_rewards = ProcessRewards(
            spec.process_rewards, player.policy.decoder, rollouts, spec, spec.token_budget
        )

    @property
    def epoch(self) -> int:
        return self._tasks.epoch

    def sample(self, step: int, watch: Stopwatch) -> Groups:
        """Sample the groups of a step; replace dead groups if the algorithm does so."""
        spec, player = self._spec, self._player
        auxiliary = spec.auxiliary_rewards
        drawn_tasks: list[DrawnTask] = []

        def play(count: int, first: int) -> Groups:
            drawn = self._tasks.take(count, step, first)
            drawn_tasks.extend(drawn)
            groups = self._process_rewards.play(
                [task for task, _ in drawn],
                samples=spec.samples,
                params=spec.params(player.policy.stop_token_ids),
                step=step,
                watch=watch,
                first=first,
            )
            return groups if auxiliary is None else auxiliary.add(groups, step, spec.steps)

        groups = play_until_live(play, spec.prompts, spec.algorithm.refills)
        self._tasks.check(groups, step)
        return self._tasks.observe(drawn_tasks, groups)
