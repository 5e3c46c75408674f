"""Dynamic sampling: new tasks replace dead groups, whose rewards are all equal (DAPO, arXiv 2503.14476).

The policy learns only from live groups, which leaves out the hardest and the easiest tasks. Pass rates
therefore cover all groups. Groups keep the order of their tasks: the order of completion would favor short
answers.
"""

from collections.abc import Callable
from math import ceil

from perilune.learn.advantages import is_dead
from perilune.learn.weights import WeightedGroup, rewards
from perilune.rollout.groups import Groups


def play_until_live(play: Callable[[int, int], Groups], wanted: int, refills: int) -> Groups:
    """Sample until `wanted` groups are live, or for `refills` further rounds; return all groups.

    Args:
        play: samples groups; its arguments are the number of new tasks, and that of the step's earlier tasks.
    """
    groups, played = play(wanted, 0), wanted
    for _ in range(refills):
        live = sum(not is_dead(rewards(group)) for group in groups)
        if live >= wanted:
            break
        needed = min(ceil((wanted - live) * played / max(live, 1)), wanted)
        groups, played = groups + play(needed, played), played + needed
    return groups


def select_groups(groups: list[WeightedGroup], wanted: int, refills: int) -> list[WeightedGroup]:
    """Return the groups to learn from: the first `wanted` live ones with refills, else all."""
    return [group for group in groups if not group.dead][:wanted] if refills else groups
