"""Choice of preference pairs, and files of pairs."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from perilune.data.episode import Episode
from perilune.data.preferences import (
    choose_pairs,
    make_pair,
    parse_preference,
    write_preferences,
)
from perilune.data.sources import read_rows
from perilune.errors import RequestError


def answer(text: str, reward: float | None, *, length: int = 3, truncated: bool = False) -> Episode:
    return Episode(
        episode_id=text, group_id="g", task_id="t", environment="e", seed=0,
        messages=({"role": "user", "content": "ask"}, {"role": "assistant", "content": text}),
        prompt_ids=np.zeros(1, np.int32), token_ids=np.zeros(length, np.int32),
        loss_mask=np.ones(length, np.bool_), logprobs=np.zeros(length, np.float32),
        policy_version=np.zeros(length, np.int32), finish_reason="length" if truncated else "stop",
        reward=reward, failure="" if reward is not None else "verifier: no idea",
    )  # fmt: skip


def texts(pairs: list[tuple[Episode, Episode]]) -> list[tuple[str, str]]:
    return [(better.text, worse.text) for better, worse in pairs]


def test_choose_pairs_pairs_best_with_worst_and_uses_each_answer_once() -> None:
    group = [answer("a", 0.2), answer("b", 0.9), answer("c", 0.5), answer("d", 0.0)]
    assert texts(choose_pairs(group, most=5, gap=0.1)) == [("b", "d"), ("c", "a")]
    assert texts(choose_pairs(group, most=1, gap=0.1)) == [("b", "d")]
    assert texts(choose_pairs(group, most=5, gap=0.5)) == [("b", "d")]
    assert choose_pairs(group, most=5, gap=1.0) == []


def test_choose_pairs_skips_equal_rewards() -> None:
    assert choose_pairs([answer("a", 1.0), answer("b", 1.0)], most=2, gap=0.01) == []


def test_choose_pairs_skips_truncated_and_unscored_answers() -> None:
    group = [answer("a", 1.0), answer("b", 0.0, truncated=True), answer("c", None)]
    assert choose_pairs(group, most=2, gap=0.5) == []
    assert choose_pairs([answer("a", 1.0, truncated=True), answer("b", 0.0)], most=2, gap=0.5) == []


def test_choose_pairs_uses_equal_texts_once() -> None:
    group = [answer("a", 1.0), answer("b", 0.0), answer("a", 1.0), answer("b", 0.0)]
    assert len(choose_pairs(group, most=4, gap=0.5)) == 1


def test_choose_pairs_skips_similar_texts_and_large_length_gaps() -> None:
    group = [answer("aaaaaaaa", 1.0, length=9), answer("aaaaaaab", 0.0, length=9), answer("xy", 0.0)]
    assert texts(choose_pairs(group, most=1, gap=0.5, most_alike=0.8)) == [("aaaaaaaa", "xy")]
    assert texts(choose_pairs(group, most=1, gap=0.5, length_gap=2)) == [("aaaaaaaa", "aaaaaaab")]
    assert choose_pairs(group, most=1, gap=0.5, most_alike=0.8, length_gap=2) == []


def test_preferences_round_trip_through_file(tmp_path: Path) -> None:
    record = make_pair(answer("good\n", 1.0), answer("bad", 0.25), source="sampled/sft")
    write_preferences(tmp_path / "preferences.jsonl", [record])
    (row,) = read_rows(tmp_path)
    assert parse_preference(row.value, row.place) == record
    assert record.prompt == ({"role": "user", "content": "ask"},)
    assert dataclasses.asdict(record)["rejected"] == ({"role": "assistant", "content": "bad"},)


def test_preference_of_rejects_message_with_weight() -> None:
    row = dataclasses.asdict(make_pair(answer("good", 1.0), answer("bad", 0.0), source="sampled/sft"))
    row |= {name: list(row[name]) for name in ("prompt", "chosen", "rejected")}
    assert parse_preference(row, "row 1").chosen[0]["content"] == "good"
    row["rejected"] = [{"role": "assistant", "content": "bad", "weight": 0}]
    with pytest.raises(RequestError, match="needs exactly role and content"):
        parse_preference(row, "row 1")
