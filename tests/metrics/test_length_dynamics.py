"""Length changes split into the policy's behaviour and the composition of tasks."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.data.episode import Episode
from perilune.metrics.length_dynamics import (
    Bin,
    decompose_length,
    length_bins,
    length_dynamics,
)

BINS = st.dictionaries(
    st.sampled_from("abcd"), st.builds(Bin, st.integers(1, 50), st.floats(1, 500)), min_size=1
)


def answer(
    length: int, difficulty: float | None = None, reward: float | None = 1.0, **more: object
) -> Episode:
    episode = Episode(
        episode_id="0/0/0", group_id="0/0", task_id="t", environment="e", seed=0,
        messages=({"role": "assistant", "content": "x"},),
        prompt_ids=np.zeros(1, np.int32), token_ids=np.zeros(length, np.int32),
        loss_mask=np.ones(length, np.bool_), logprobs=np.full(length, -0.5, np.float32),
        policy_version=np.zeros(length, np.int32), finish_reason="stop", reward=reward,
        metrics={} if difficulty is None else {"difficulty": difficulty},
        failure="" if reward is not None else "verifier: no",
    )  # fmt: skip
    return dataclasses.replace(episode, **more)


@given(BINS, BINS)
def test_behaviour_and_composition_sum_to_the_change(before: dict[str, Bin], after: dict[str, Bin]) -> None:
    split = decompose_length(before, after)
    assert split.behaviour + split.composition == pytest.approx(split.after - split.before, abs=1e-9)


def test_harder_tasks_alone_change_composition() -> None:
    before = {"1": Bin(90, 10.0), "5": Bin(10, 100.0)}
    after = {"1": Bin(10, 10.0), "5": Bin(90, 100.0)}
    split = decompose_length(before, after)
    assert (split.behaviour, split.composition) == pytest.approx((0.0, 72.0))


def test_longer_answers_to_the_same_tasks_change_behaviour() -> None:
    split = decompose_length({"1": Bin(5, 10.0), "2": Bin(5, 20.0)}, {"1": Bin(5, 15.0), "2": Bin(5, 30.0)})
    assert (split.behaviour, split.composition) == pytest.approx((7.5, 0.0))


def test_added_and_removed_bins_change_composition() -> None:
    split = decompose_length({"1": Bin(1, 10.0)}, {"2": Bin(1, 30.0)})
    assert (split.behaviour, split.composition) == pytest.approx((0.0, 20.0))


def test_length_bins_group_by_difficulty() -> None:
    episodes = [answer(4, 2.0), answer(8, 2.0), answer(5)]
    assert length_bins(episodes) == {"2": Bin(2, 6.0), "unknown": Bin(1, 5.0)}
    observed = answer(4, loss_mask=np.array([True, False, False, True]))
    assert length_bins([observed]) == {"unknown": Bin(1, 2.0)}  # tokens of the environment do not count


def test_table_groups_lengths_by_difficulty_and_correctness() -> None:
    before = [answer(4, 2.0), answer(9, 2.0, 0.0, finish_reason="length"), answer(7, 10.0, None)]
    after = [answer(6, 2.0), answer(8, 10.0, 0.5, metrics={"difficulty": 10.0, "gold": 1.0})]
    change = length_dynamics(before, after)
    assert change["table"] == [
        {
            "difficulty": "2", "correct": False,
            "before": {"count": 1, "length": 9.0, "truncated": 1.0}, "after": None,
        },
        {
            "difficulty": "2", "correct": True,
            "before": {"count": 1, "length": 4.0, "truncated": 0.0},
            "after": {"count": 1, "length": 6.0, "truncated": 0.0},
        },
        {
            "difficulty": "10", "correct": True, "before": None,
            "after": {"count": 1, "length": 8.0, "truncated": 0.0},
        },
    ]  # fmt: skip
    assert change["behaviour"] + change["composition"] == pytest.approx(change["after"] - change["before"])
