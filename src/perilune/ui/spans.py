"""Data of the page about an episode's sub-agents and process rewards."""

import math
from typing import Any

from perilune.data.episode import Episode
from perilune.data.spans import critical_steps, total_steps
from perilune.ui.turns import shorten_messages


def span_lanes(episode: Episode, most: int) -> dict[str, Any] | None:
    """Return one lane for each agent of an episode, or None without sub-agents.

    Args:
        most: maximum number of characters of each text.
    """
    if not episode.spans:
        return None
    return {
        "total": total_steps(episode.spans),
        "critical": critical_steps(episode.spans),
        "lanes": [
            {
                "id": span.span_id,
                "name": span.name,
                "rounds": span.rounds,
                "joined": span.joined,
                "prompt_tokens": span.prompt_tokens,
                "tokens": span.tokens,
                "version": span.policy_version,
                "messages": shorten_messages(span.messages, most),
            }
            for span in sorted(episode.spans, key=lambda span: [*map(int, span.span_id.split("."))])
        ],
    }


def list_step_rewards(episode: Episode) -> list[tuple[int, float]]:
    """Return (position of its last token, reward) for each segment with a process reward."""
    if episode.step_rewards is None:
        return []
    return [
        (position, float(f"{value:.6g}"))
        for position, value in enumerate(episode.step_rewards.tolist())
        if math.isfinite(value)
    ]
