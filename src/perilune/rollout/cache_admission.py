"""Limits the multi-turn groups that play at once to those that the KV cache holds.

Between its turns an episode computes nothing, but its next turn reads the keys and values of earlier turns.
When more episodes play than the cache holds, they evict each other's keys and values, and every turn computes
its whole context again.
"""

from collections.abc import Collection, Mapping
from typing import Any

from perilune.rollout.rollout import Rollout


class CacheAdmission:
    """Decides whether another group may begin, from the expected sizes of the groups in play.

    The expected size of a group is the mean of the finished groups, or its own size once that is larger.
    Until a group has finished, the expected size is the limit of a group, so few groups begin at first.

    Args:
        tokens: capacity of the KV cache.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._playing: dict[Any, Mapping[int, Rollout]] = {}
        self._finished = self._finished_tokens = 0

    def has_room(self, max_tokens: int) -> bool:
        """Return whether a group of at most `max_tokens` tokens may begin. True when no group is in play."""
        expected = self._finished_tokens / self._finished if self._finished else max_tokens
        load = sum(max(expected, group_tokens(group.values())) for group in self._playing.values())
        return not self._playing or load + expected <= self._tokens

    def begin(self, key: Any, group: Mapping[int, Rollout]) -> None:
        """Count a group by the current tokens of its rollouts, which are added as their sessions open."""
        self._playing[key] = group

    def end(self, key: Any) -> None:
        """Stop counting a group, and expect the next to be of a similar size."""
        if (group := self._playing.pop(key, None)) is not None:
            self._finished += 1
            self._finished_tokens += group_tokens(group.values())


def group_tokens(group: Collection[Rollout]) -> int:
    """Return the tokens of a group in the cache. Its samples share their prompts."""
    own = sum(len(trajectory.token_ids) for rollout in group for trajectory in rollout.trajectories)
    shared = max(
        (sum(len(trajectory.prompt_ids) for trajectory in rollout.trajectories) for rollout in group),
        default=0,
    )
    return own + shared
