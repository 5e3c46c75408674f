"""How long an episode may be, and what happens when one fails: the same keys for every environment."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

KEY = "episodes"  # of the environment section of a recipe


class EpisodeSettings(BaseModel):
    """Bounds of an episode, and the policy for those that fail."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_turns: int | None = Field(
        None, ge=1, description="most actions of an episode of several; null: as many as the environment says"
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="most tokens after the prompt, what the environment says included; null: twice the"
        " stage's max_tokens a turn. A turn begins only where all of those fit",
    )
    seconds: float = Field(
        10.0, gt=0, description="longest that a step of the environment or a verdict takes"
    )
    on_failure: Literal["drop", "stop"] = Field(
        "drop", description="an episode that failed is counted and left out; or the run stops at the first"
    )
    max_failures: float = Field(
        0.5, ge=0, le=1, description="largest share of episodes sampled together that may fail"
    )


def episode_settings(section: Mapping[str, Any]) -> EpisodeSettings:
    """What an environment section says of episodes.

    Raises:
        pydantic.ValidationError: when a field is unknown or impossible.
    """
    return EpisodeSettings.model_validate(dict(section.get(KEY) or {}))


def without_episode_settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section as the environment itself knows it."""
    return {key: value for key, value in section.items() if key != KEY}


@cache
def with_episode_settings(model: type[BaseModel]) -> type[BaseModel]:
    """The model of an environment's section, with the key that every environment has."""
    info = Field(default_factory=EpisodeSettings, description="bounds of an episode, and what failures do")
    fields: dict[str, Any] = {KEY: (EpisodeSettings, info)}
    return create_model(model.__name__, __base__=model, __doc__=model.__doc__, **fields)
