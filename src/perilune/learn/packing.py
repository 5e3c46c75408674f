"""Packing for objectives that weigh tokens themselves: every token of an episode counts, none is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from perilune.data.episode import Episode
from perilune.errors import RequestError
from perilune.learn.batch import PackedBatch, pack
from perilune.learn.weights import WeightedGroup, aggregate

Pair = tuple[Episode, Episode]  # two answers to one prompt, the better one first


def pack_each(episodes: Iterable[Episode], token_budget: int) -> list[PackedBatch]:
    """Pack episodes in order, each for itself, into batches of at most `token_budget` tokens."""
    return pack([_group((one,)) for one in episodes], token_budget)


def pack_pairs(pairs: Iterable[Pair], token_budget: int) -> list[PackedBatch]:
    """Pack the pairs of one step, a prompt fed once and no pair cut; a longer one gets a batch of its own.

    Raises:
        RequestError: naming a completion without a token of its own, or a pair of different prompts.
    """
    pairs = list(pairs)
    for chosen, rejected in pairs:
        for one in (chosen, rejected):
            if not one.loss_mask.any():
                raise RequestError("a completion without tokens cannot be compared", where=one.episode_id)
        if not np.array_equal(chosen.prompt_ids, rejected.prompt_ids):
            raise RequestError("the two answers are to different prompts", where=chosen.episode_id)
    longest = max((len(a.prompt_ids) + len(a.token_ids) + len(b.token_ids) for a, b in pairs), default=0)
    return pack([_group(pair) for pair in pairs], max(token_budget, longest))


def _group(episodes: Sequence[Episode]) -> WeightedGroup:
    weights = aggregate(episodes, [1.0] * len(episodes), "token-mean")
    return WeightedGroup(episodes=tuple(episodes), cross_entropy=weights)
