"""Figures of games, and alarms about a collapse of self-play."""

import math
from dataclasses import replace

import numpy as np
import pytest

from perilune.data.episode import Episode
from perilune.errors import WorkFailedError
from perilune.tasks.selfplay.health import effective_number, find_alarms, game_figures
from perilune.tasks.stage.outcomes import outcome_figures


def episode(group: str, said: str, reward: float | None, **metrics: float) -> Episode:
    return Episode(
        episode_id=f"{group}/0", group_id=group, task_id="t", environment="e", seed=0,
        messages=({"role": "user", "content": "?"}, {"role": "assistant", "content": said}),
        prompt_ids=np.zeros(1, np.int32), token_ids=np.ones(1, np.int32), loss_mask=np.ones(1, np.bool_),
        logprobs=np.zeros(1, np.float32), policy_version=np.zeros(1, np.int32),
        finish_reason="stop", metrics=metrics, reward=reward,
        failure=None if reward is not None else "environment: none",
    )  # fmt: skip


def test_game_figures() -> None:
    games = [
        episode("3/0", "a", 1.0, illegal=1.0, turns=2.0),
        episode("3/0/p1", "x", -1.0, illegal=1.0, turns=1.0),
        episode("3/1", "b", 0.0, illegal=0.0, turns=3.0),
        episode("3/1/p1", "y", 0.0, illegal=0.0, turns=2.0),
        episode("3/2", "c", None),
    ]
    figures = game_figures(games)
    assert [game.player for game in games] == [0, 1, 0, 1, 0]
    assert figures == {
        "illegal": 0.5, "turns": 2.0, "unfinished": 0.0, "drawn": 0.5, "openings": pytest.approx(2.0),
        "seat/0/reward": 0.5, "seat/0/won": 0.5, "seat/1/reward": -0.5, "seat/1/won": 0.0,
    }  # fmt: skip
    assert game_figures([]) == {}
    cut = replace(episode("3/3", "d", 0.0, illegal=0.0), finish_reason="length")
    ended = episode("3/4", "e", 0.0, illegal=1.0)  # with `illegal_move: ends`
    figures = game_figures([*games[2:4], cut, ended])  # a game of both players, and two of one
    assert [figures[name] for name in ("drawn", "unfinished", "illegal")] == pytest.approx([1 / 3] * 3)


def test_step_in_which_the_policy_never_moved_is_an_error() -> None:
    """In the games against a member, an illegal first move of the member leaves no episode."""
    with pytest.raises(WorkFailedError, match="step 3: the policy took no turn"):
        outcome_figures([], "step 3")


def test_effective_number() -> None:
    assert effective_number({"a": 5}) == 1.0
    assert effective_number({"a": 3, "b": 3}) == pytest.approx(2.0)
    assert 1 < effective_number({"a": 9, "b": 1}) < 2


HEALTHY = {"illegal": 0.02, "unfinished": 0.0, "entropy": 0.4, "openings": 5.0}


@pytest.mark.parametrize(
    ("sick", "name", "is_collapse"),
    [
        ({"illegal": 0.5}, "illegal", True),
        ({"unfinished": 0.4}, "unfinished", True),
        ({"entropy": 0.001}, "entropy", False),
        ({"openings": 1.0}, "openings", False),
    ],
)
def test_alarms_require_a_sign_to_persist(sick: dict[str, float], name: str, is_collapse: bool) -> None:
    lines = [dict(HEALTHY) for _ in range(20)]
    assert find_alarms(lines) == []
    assert find_alarms([*lines, {**HEALTHY, **sick}]) == []
    (alarm,) = find_alarms([*lines, *[{**HEALTHY, **sick}] * 8])
    assert (alarm.name, alarm.is_collapse) == (name, is_collapse) and alarm.message
    assert find_alarms([*lines, *[{**HEALTHY, **sick}] * 8, *[HEALTHY] * 8]) == []


def test_illegal_move_alarm_is_relative_to_the_start() -> None:
    assert find_alarms([{**HEALTHY, "illegal": 0.6}] * 8 + [{**HEALTHY, "illegal": 0.65}] * 8) == []
    assert find_alarms([{**HEALTHY, "illegal": 0.6}] * 8 + [{**HEALTHY, "illegal": 0.9}] * 8) != []


def test_weaker_play_than_at_the_start_is_a_collapse_at_once() -> None:
    (alarm,) = find_alarms([HEALTHY], weaker=["minimax"])
    assert alarm.is_collapse and "minimax" in alarm.message


def test_openings_alarm_is_relative_to_the_start() -> None:
    assert find_alarms([{**HEALTHY, "openings": 1.0}] * 30) == []
    assert math.isclose(effective_number({"a": 1}), 1)
