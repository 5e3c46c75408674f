"""Dynamic sampling: new tasks in place of groups whose answers are all alike (DAPO, arXiv 2503.14476).

Which tasks are learned from then depends on the policy: hard and easy ones fall out. Pass rates are therefore
of all groups that were played, and groups are kept in the order in which their tasks came, never by who was
first done: short answers would win.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from perilune.learn.advantages import is_dead
from perilune.learn.weights import WeightedGroup, rewards
from perilune.rollout.groups import Groups


def play_until_live(play: Callable[[int, int], Groups], wanted: int, refills: int) -> Groups:
    """All groups that were played, until `wanted` of them are live or `refills` rounds more are over.

    Args:
        play: plays so many new tasks; its second argument is how many the step has had before.
    """
    groups = play(wanted, 0)
    for _ in range(refills):
        live = sum(not is_dead(rewards(group)) for group in groups)
        if live >= wanted:
            break
        needed = ceil((wanted - live) * len(groups) / max(live, 1))
        groups = groups + play(min(needed, wanted), len(groups))
    return groups


def kept(groups: list[WeightedGroup], wanted: int, refills: int) -> list[WeightedGroup]:
    """The groups to learn from: all, or with refills the first `wanted` live ones."""
    return [group for group in groups if not group.dead][:wanted] if refills else groups
