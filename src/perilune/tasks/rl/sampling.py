"""The rollout side of reinforcement learning: from tasks to finished groups.

The learner side (`perilune.tasks.rl.update`) receives only groups of `Episode`, whose tokens carry the
version of the weights that sampled them. Weights travel the other way, through `Publisher`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        self._counted = self._count_prompt_tokens()
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
        self._counted = self._count_prompt_tokens()
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

    def timings(self) -> Mapping[str, float]:
        """Return the share of the last step's prompt tokens that the engine's prefix cache had."""
        cached, computed = self._count_prompt_tokens() - self._counted
        return {"prefix_hits": float(cached / (cached + computed))} if cached + computed else {}

    def _count_prompt_tokens(self) -> NDArray[np.int64]:
        """Return the prompt tokens since the engine was created: found in its prefix cache, and computed."""
        counters = self._player.engine.counters
        return np.array([counters.cached_tokens, counters.prompt_tokens])
