"""Conditions that select episodes (`--where`)."""

import numpy as np
import pytest

from perilune.data.episode import Episode
from perilune.errors import RequestError
from perilune.traces.where import parse_where

EPISODE = Episode(
    episode_id="3/1/0",
    group_id="3/1",
    task_id="t",
    environment="tools/all",
    seed=0,
    messages=({"role": "user", "content": "q"}, {"role": "assistant", "content": "an answer"}),
    prompt_ids=np.array([5, 6], np.int32),
    token_ids=np.array([7, 8, 9], np.int32),
    loss_mask=np.ones(3, np.bool_),
    logprobs=np.zeros(3, np.float32),
    policy_version=np.zeros(3, np.int32),
    finish_reason="length",
    reward=0.25,
    reward_terms={"format": 0.5},
    metrics={"contained/timeout": 2.0, "gold": 1.0},
)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("", True),
        ("reward_terms.format < 1 and truncated", True),
        ("reward > 0.25", False),
        ("reward >= 2.5e-1", True),
        ("reward != -1", True),
        ("not truncated or reward == 0.25", True),
        ("not (truncated or reward == 0.25)", False),
        ("false and false or true", True),  # `and` binds closer
        ("true or true and false", True),
        ("metrics.contained/timeout > 1", True),
        ("metrics.calls < 1", False),  # the episode has no such metric
        ("not metrics.calls < 1", True),
        ("reward < metrics.gold", True),
        ("environment ~ 'tools/' and text ~ \"answer\"", True),
        ("finish_reason == 'stop'", False),
        ("step == 3 and tokens == 5 and sampled == 3", True),
        ("failure", False),
        ("reward == 'a'", False),
        ("reward != 'a'", True),
    ],
)
def test_condition_is_evaluated(text: str, holds: bool) -> None:
    assert parse_where(text)(EPISODE) is holds


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rewards < 1", "no 'rewards'"),
        ("__class__ == 1", "no '__class__'"),
        ("metrics. < 1", "no 'metrics.'"),
        ("reward <", "ends too early"),
        ("reward 1", "does not continue"),
        ("(reward < 1", "not closed"),
        ("reward < 1)", "does not continue"),
        ("reward = 1", "cannot read"),
        ("< 1", "where a name"),
        ("reward; import os", "cannot read"),
        ("not " * 200 + "truncated", "nested too deeply"),
        ("(" * 2000, "nested too deeply"),
    ],
)
def test_invalid_condition_is_refused(text: str, problem: str) -> None:
    with pytest.raises(RequestError, match=problem.replace("(", r"\(")):
        parse_where(text)
