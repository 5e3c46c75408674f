"""Dynamic sampling: refills for dead groups, their size, order, and limit."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from perilune.data.episode import Episode
from perilune.learn.weights import WeightedGroup
from perilune.rollout.dynamic_sampling import play_until_live, select_groups


def group(name: int, rewards: Sequence[float]) -> tuple[Episode, ...]:
    zeros = np.zeros(1, np.int32)
    return tuple(
        Episode(
            f"{name}/{i}", str(name), str(name), "test", 0, (), zeros, zeros, np.ones(1, np.bool_),
            np.zeros(1, np.float32), zeros, "stop", reward=reward,
        )
        for i, reward in enumerate(rewards)
    )  # fmt: skip


class Playing:
    """Groups by index: live where the pattern `live` has a plus sign."""

    def __init__(self, live: str) -> None:
        self.live = live
        self.asked: list[tuple[int, int]] = []

    def __call__(self, count: int, before: int) -> Any:
        self.asked.append((count, before))
        alive = [self.live[index % len(self.live)] == "+" for index in range(before, before + count)]
        return [group(before + i, [1, 0] if live else [1, 1]) for i, live in enumerate(alive)]


def test_live_groups_need_no_refill() -> None:
    play = Playing("+")
    assert len(play_until_live(play, 4, refills=10)) == 4
    assert play.asked == [(4, 0)]


def test_dead_groups_stay_without_refills() -> None:
    play = Playing("-")
    assert len(play_until_live(play, 4, refills=0)) == 4


def test_refill_size_follows_the_rate_of_live_groups() -> None:
    play = Playing("+---")
    groups = play_until_live(play, 8, refills=10)
    assert play.asked == [(8, 0), (8, 8), (8, 16), (8, 24)]  # 6 missing at a rate of 1 in 4, at most 8 a time
    assert [group[0].group_id for group in groups] == [str(i) for i in range(32)]
    few = Playing("+++-")
    play_until_live(few, 8, refills=10)
    assert few.asked == [(8, 0), (3, 8)]  # 2 missing at a rate of 3 in 4


def test_refills_count_tasks_and_not_groups() -> None:
    """A task of several players has several groups, or none if no player of the policy moved."""
    asked = []

    def play(count: int, before: int) -> Any:
        asked.append((count, before))
        return [group(before + task, [1, 1]) for task in range(count) for _ in range(2 * (task % 2))][:-1]

    play_until_live(play, 4, refills=2)
    assert asked == [(4, 0), (4, 4), (4, 8)]


def test_refills_stop_at_the_limit() -> None:
    play = Playing("-")
    assert len(play_until_live(play, 4, refills=3)) == 16
    assert len(play.asked) == 4


def test_kept_returns_the_first_live_groups_in_order() -> None:
    weighted = [WeightedGroup((), dead=dead) for dead in (True, False, False, True, False)]
    assert select_groups(weighted, 2, refills=1) == [weighted[1], weighted[2]]
    assert select_groups(weighted, 2, refills=0) == weighted
    assert select_groups(weighted[:1], 2, refills=1) == []
