"""How many groups of several turns play at once: as many as the KV cache holds.

Between its turns an episode computes nothing, but its next turn reads the keys and values of those before.
When more episodes play than the cache holds, they evict each other's, and every turn computes its whole
context anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from perilune.rollout.rollout import Rollout


class CacheRoom:
    """Decides whether another group may begin, from the tokens of the groups in play.

    A group counts with the mean size of the finished groups, or with its own size once that is larger. Before
    a group has finished it counts with the most tokens that it may have, so sampling begins with few groups.

    Args:
        tokens: that the KV cache holds.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._playing: dict[Any, Mapping[int, Rollout]] = {}
        self._finished = self._finished_tokens = 0

    def has_room(self, most: int) -> bool:
        """Whether a group of at most `most` tokens may begin. One always plays."""
        expected = self._finished_tokens / self._finished if self._finished else most
        load = sum(max(expected, size(group.values())) for group in self._playing.values())
        return not self._playing or load + expected <= self._tokens

    def begin(self, key: Any, group: Mapping[int, Rollout]) -> None:
        """Count a group by the current tokens of its rollouts, which are added as their sessions open."""
        self._playing[key] = group

    def end(self, key: Any) -> None:
        """Stop counting a group, and expect the next to be of a similar size."""
        if (group := self._playing.pop(key, None)) is not None:
            self._finished += 1
            self._finished_tokens += size(group.values())


def size(group: Collection[Rollout]) -> int:
    """Tokens of a group in the cache. Its samples share their prompts."""
    own = sum(len(one.token_ids) for rollout in group for one in rollout.trajectories)
    shared = max((sum(len(one.prompt_ids) for one in rollout.trajectories) for rollout in group), default=0)
    return own + shared
