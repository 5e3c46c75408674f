"""The `episodes` section that every environment accepts: bounds of an episode and the policy for failures."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from perilune.frozen import Frozen

EPISODES_KEY = "episodes"  # in the environment section of a recipe


class EpisodeSettings(Frozen):
    """Bounds of an episode and the policy for failed episodes."""

    max_turns: int | None = Field(
        None,
        ge=1,
        description="maximum turns of all players of an episode, without those of sub-agents; null: the"
        " environment's own limit",
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="maximum tokens of a multi-turn episode after its prompt, including the environment's"
        " messages; null: 2 * max_tokens of the stage * maximum turns. A turn starts only if"
        " max_tokens more tokens fit",
    )
    seconds: float = Field(
        10.0, gt=0, description="time limit of each step of the environment, and of each scoring, in seconds"
    )
    on_failure: Literal["drop", "stop"] = Field(
        "drop",
        description="drop: count failed episodes and leave them out; stop: end the run at the first failure",
    )
    max_failures: float = Field(
        0.5,
        ge=0,
        le=1,
        description="with on_failure: drop, the share of failed episodes in a batch above which the run ends",
    )


def episode_settings(section: Mapping[str, Any]) -> EpisodeSettings:
    """Return the episode settings of an environment section.

    Raises:
        pydantic.ValidationError: if a field is unknown or invalid.
    """
    return EpisodeSettings.model_validate(dict(section.get(EPISODES_KEY) or {}))
