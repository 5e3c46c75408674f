"""A recipe of one stage that evaluates a checkpoint."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perilune.errors import RequestError
from perilune.recipe.resolve import resolve
from perilune.recipe.schema import Recipe
from perilune.recipe.source import Document

EVALUATION_STAGE = "evaluation"


def make_evaluation_recipe(
    folder: Path, environment: Mapping[str, Any], fields: Mapping[str, Any], seed: int, *, called: str = ""
) -> Recipe:
    """Make the recipe that evaluates the checkpoint in `folder`.

    Args:
        environment: the section of the environment, which may have `rewards`.
        fields: keys of the stage: tasks, samples, max_tokens and others; None leaves out a key.
        called: name of the checkpoint, for the name of the recipe. Default: the path of the folder.

    Raises:
        RequestError: when the environment or a field is wrong.
    """
    try:
        section = dict(environment)
    except (TypeError, ValueError):
        what = f"{environment!r} is not a section of keys"
        raise RequestError(what, where="environment", remedy="{'id': 'calculator'}") from None
    values = {key: value for key, value in fields.items() if value is not None}
    rewards = section.pop("rewards", {})
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", called or str(folder)).strip("-")
    document = {
        "name": f"eval-{name}"[:64],
        "seed": seed,
        "model": {"path": str(folder)},
        "environment": section,
        "rewards": rewards,
        "stages": [{"name": EVALUATION_STAGE, "task": "evaluate", "checkpoint": "model", **values}],
    }
    return resolve(Document(document), Path.cwd())
