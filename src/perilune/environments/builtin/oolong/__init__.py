"""Aggregation tasks over long contexts, after OOLONG: generated offline, at any length."""

from perilune.environments.builtin.oolong.environment import OolongEnvironment
from perilune.environments.builtin.oolong.settings import OolongSettings
from perilune.environments.builtin.oolong.tasks import (
    context_lines,
    draw_task,
    draw_tasks,
    gold,
    gold_of_part,
    line_labels,
    question,
    score_answer,
)

__all__ = [
    "OolongEnvironment",
    "OolongSettings",
    "context_lines",
    "draw_task",
    "draw_tasks",
    "gold",
    "gold_of_part",
    "line_labels",
    "question",
    "score_answer",
]
