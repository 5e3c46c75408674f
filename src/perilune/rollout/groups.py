"""Groups: the episodes of one task and player, gathered from all processes of a stage."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from perilune.data.episode import Episode
from perilune.data.episodes_file import episodes_from_bytes, episodes_to_bytes, map_episodes
from perilune.learn.distributed import Ranks
from perilune.rollout.timing import Stopwatch

Groups = list[tuple[Episode, ...]]


def flatten(groups: Iterable[Sequence[Episode]]) -> list[Episode]:
    return [episode for group in groups for episode in group]


def gather_groups(own: Groups, ranks: Ranks, watch: Stopwatch) -> Groups:
    """Gather the groups of all processes, in the order of the step's tasks."""
    if ranks.count == 1:
        return own
    parts = ranks.all_gather("the episodes", groups_to_bytes(own))
    groups = [group for part in parts for group in groups_from_bytes(part)]
    watch.tokens += _count_sampled_tokens(groups) - _count_sampled_tokens(own)
    # Group ids begin with "step/index".
    return sorted(groups, key=lambda group: int(group[0].group_id.split("/")[1]))


def groups_to_bytes(groups: Groups) -> bytes:
    """Return the groups as one Arrow stream of episodes."""
    return episodes_to_bytes(episode for group in groups for episode in group)


def groups_from_bytes(stream: bytes) -> Groups:
    return _group_episodes(episodes_from_bytes(stream))


def map_groups(path: Path) -> Groups:
    """Return the groups of a file with the bytes of `groups_to_bytes`; see `map_episodes`."""
    return _group_episodes(map_episodes(path))


def _group_episodes(episodes: list[Episode]) -> Groups:
    return [tuple(group) for _, group in groupby(episodes, key=lambda episode: episode.group_id)]


def _count_sampled_tokens(groups: Groups) -> int:
    return sum(int(episode.loss_mask.sum()) for group in groups for episode in group)
