"""Groups: the episodes of one task and player, gathered from all processes of a stage."""

from __future__ import annotations

from itertools import groupby

from perilune.data.episode import Episode
from perilune.data.episodes_file import from_bytes, to_bytes
from perilune.learn.distributed import Ranks
from perilune.rollout.timing import Stopwatch

Groups = list[tuple[Episode, ...]]


def gather_groups(own: Groups, ranks: Ranks, watch: Stopwatch) -> Groups:
    """Gather the groups of all processes, in the order of the step's tasks."""
    if ranks.count == 1:
        return own
    parts = ranks.all_gather("the episodes", to_bytes(one for group in own for one in group))
    played = (groupby(from_bytes(part), key=lambda one: one.group_id) for part in parts)
    groups = [tuple(group) for part in played for _, group in part]
    watch.tokens += _sampled(groups) - _sampled(own)
    # Group ids are "step/index" or "step/index/p1".
    return sorted(groups, key=lambda group: int(group[0].group_id.split("/")[1]))


def _sampled(groups: Groups) -> int:
    return sum(int(one.loss_mask.sum()) for group in groups for one in group)
