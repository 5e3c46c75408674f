"""Finds the evaluation to compare with: that of the nearest ancestor of the evaluated checkpoint.

Two stages that train from the same checkpoint may follow each other in a recipe, but the difference of their
evaluations says nothing about either stage.
"""

from collections.abc import Mapping
from typing import Any

# Settings that change the precision of an evaluation, not what it measures.
SAMPLE_SIZE_KEYS = ("tasks", "samples")


def find_parent_evaluation(
    evaluation: str, checkpoints: Mapping[str, str | None], settings: Mapping[str, Mapping[str, Any]]
) -> str | None:
    """Return the evaluation of the nearest evaluated ancestor of a checkpoint, or None.

    Args:
        evaluation: name of the evaluation stage of the checkpoint.
        checkpoints: the input checkpoint of each stage: the name of a stage, or "model".
        settings: by evaluation, all settings that influence its figures except the checkpoint. Only
            evaluations with equal settings, apart from `SAMPLE_SIZE_KEYS`, are compared.
    """
    visited: set[str | None] = {None}
    wanted = _comparable_settings(settings[evaluation])
    ancestor = checkpoints.get(checkpoints.get(evaluation) or "")
    while ancestor not in visited:
        for other, values in settings.items():
            if (
                other != evaluation
                and checkpoints.get(other) == ancestor
                and _comparable_settings(values) == wanted
            ):
                return other
        visited.add(ancestor)
        ancestor = checkpoints.get(ancestor or "")
    return None


def _comparable_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in SAMPLE_SIZE_KEYS}
