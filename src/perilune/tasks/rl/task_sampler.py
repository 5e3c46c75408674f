"""Selects the training tasks of a run: in the environment's order, or by a curriculum."""

from collections.abc import Sequence
from typing import Any

from perilune.environments.core.protocol import Task
from perilune.rollout.groups import Groups
from perilune.tasks.rl.curriculum import Curriculum, add_probabilities
from perilune.tasks.rl.curriculum_settings import CurriculumSettings
from perilune.tasks.stage.player import Player

DrawnTask = tuple[Task, float]
"""A task, and the probability that the draw of the step includes it; 1 without a curriculum."""


class TaskSampler:
    """Supplies the tasks of each step.

    Args:
        memory: the learner's memory; keeps the position in the training tasks and the curriculum's counts.
    """

    def __init__(self, settings: CurriculumSettings | None, player: Player, memory: dict[str, Any]) -> None:
        self._memory = memory
        self._tasks = player.training_tasks(skip=memory.get("tasks", 0))
        self._curriculum: Curriculum | None = None
        if settings is not None:
            counts = memory.setdefault("curriculum", {})
            self._curriculum = Curriculum(settings, player.environment, player.workspace.job.seed, counts)

    @property
    def epoch(self) -> int:
        return self._tasks.epoch

    def take(self, count: int, step: int, first: int = 0) -> list[DrawnTask]:
        """Return the next `count` tasks, drawn by the curriculum if there is one.

        Args:
            first: number of tasks already taken for this step.
        """
        if self._curriculum is None:
            drawn = [(task, 1.0) for task in self._tasks.take(count)]
        else:
            pool = self._tasks.take(count * self._curriculum.settings.candidates)
            drawn = self._curriculum.draw(pool, count, step, first)
        self._memory["tasks"] = self._tasks.taken
        return drawn

    def check(self, groups: Groups, step: int) -> None:
        """Check that the groups of a synchronous step repeat no task; a curriculum is not checked.

        Raises:
            WorkFailedError: when a task repeats within an epoch.
        """
        if self._curriculum is None:
            self._tasks.check(groups, step)

    def observe(self, drawn: Sequence[DrawnTask], groups: Groups) -> Groups:
        """Update the curriculum with the results of a step, and return the groups with task probabilities."""
        if self._curriculum is None:
            return groups
        player_groups = [group for group in groups if not group[0].is_sub_agent]
        self._curriculum.observe({task.task_id: task for task, _ in drawn}, player_groups)
        return add_probabilities(groups, {task.task_id: probability for task, probability in drawn})
