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
from perilune.tasks.rl.task_draw import Drawn, TaskDraw
from perilune.tasks.stage.player import Player


class GroupSource(ABC):
    """Where the loop gets its groups from.

    Attributes:
        versions: checksums of the versions that sampled the groups of an earlier attempt.
    """

    versions: Mapping[int, str] = {}

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Number of completed epochs of the training tasks."""

    @abstractmethod
    def sample(self, step: int, watch: Stopwatch) -> Groups:
        """The groups of a step (from 1).

        Raises:
            WorkFailedError: when sampling fails, or a task repeats within an epoch.
        """

    def figures(self, groups: Groups) -> Mapping[str, float]:
        """Reproducible figures of the groups, for metrics.jsonl."""
        return {}

    def timing(self) -> Mapping[str, float]:
        """Figures of the last step, for timings.jsonl."""
        return {}

    def remember(self) -> None:  # noqa: B027 - most sources need nothing
        """Put what a resumed run needs into the learner's memory, before a checkpoint."""

    def close(self) -> None:  # noqa: B027
        """Release processes and files."""


class GroupSampler(GroupSource):
    """Samples the groups of each step, with process rewards if the spec has them.

    Args:
        rollouts: samples the episodes, possibly with opponents.
        memory: of the learner: the position in the training tasks, and the counts of the curriculum.
    """

    def __init__(self, spec: RLSpec, player: Player, rollouts: RolloutWorker, memory: dict[str, Any]) -> None:
        self._spec, self._player = spec, player
        self._draw = TaskDraw(spec.curriculum, player, memory)
        self._process_rewards = ProcessRewards(
            spec.process_rewards, player.policy.decoder, rollouts, spec, spec.token_budget
        )

    @property
    def epoch(self) -> int:
        return self._draw.epoch

    def sample(self, step: int, watch: Stopwatch) -> Groups:
        """Sample the groups of a step, and refill dead groups if the algorithm does so."""
        spec, player = self._spec, self._player
        auxiliary = spec.auxiliary_rewards
        drawn: list[Drawn] = []

        def play(count: int, first: int) -> Groups:
            chosen = self._draw.take(count, step, first)
            drawn.extend(chosen)
            groups = self._process_rewards.play(
                [task for task, _ in chosen],
                samples=spec.samples,
                params=spec.params(player.policy.stop_token_ids),
                step=step,
                watch=watch,
                first=first,
            )
            return groups if auxiliary is None else auxiliary.add(groups, step, spec.steps)

        groups = play_until_live(play, spec.prompts, spec.algorithm.refills)
        self._draw.check(groups, step)
        return self._draw.observe(drawn, groups)
