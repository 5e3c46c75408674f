"""The length limit of an episode."""

from perilune.environments.core.episode_settings import EpisodeSettings
from perilune.environments.core.protocol import Environment


def max_episode_tokens(environment: Environment, settings: EpisodeSettings, max_tokens: int) -> int:
    """Return the most tokens of an episode after its prompt, with turns of at most `max_tokens`."""
    turns = getattr(environment, "max_turns", 1)
    if turns == 1:
        return max_tokens
    return settings.max_tokens or 2 * max_tokens * min(turns, settings.max_turns or turns)
