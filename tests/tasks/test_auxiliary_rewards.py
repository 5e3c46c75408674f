"""Auxiliary rewards: weighted terms that decay to 0, with the environment reward kept as gold."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from task_cases import DIGITS, episodes, figures_of, make_job, metrics, run_task, summary

from perilune.bundle.plugin import load_plugin
from perilune.data.episode import Episode
from perilune.errors import RequestError
from perilune.tasks.rl.auxiliary_rewards import AuxiliaryRewards
from perilune.tasks.rl.spec import RLSpec

EPISODE = Episode(
    episode_id="1/0/0",
    group_id="1/0",
    task_id="0",
    environment="e",
    seed=0,
    messages=(),
    prompt_ids=np.zeros(1, np.int32),
    token_ids=np.zeros(1, np.int32),
    loss_mask=np.ones(1, np.bool_),
    logprobs=np.zeros(1, np.float32),
    policy_version=np.zeros(1, np.int32),
    finish_reason="stop",
    reward=0.5,
    reward_terms={"parallel": 1.0, "finish": 0.25},
)


def test_auxiliary_weights_fall_linearly_to_zero() -> None:
    half = AuxiliaryRewards(weights={"parallel": 1.0})
    assert [half.scale(step, 8) for step in range(1, 9)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0]
    whole = AuxiliaryRewards(weights={"parallel": 1.0}, until=1.0)
    assert [whole.scale(step, 4) for step in range(1, 5)] == [1.0, 0.75, 0.5, 0.25]


def test_add_keeps_the_environment_reward_as_gold() -> None:
    auxiliary = AuxiliaryRewards(weights={"parallel": 2.0, "finish": -4.0})
    failed, short = replace(EPISODE, reward=None, failure="f"), replace(EPISODE, reward_terms={})
    (rewarded,) = auxiliary.add([(EPISODE, failed, short)], 3, 8)
    assert rewarded[0].reward == 0.5 + 0.5 * (2.0 - 1.0) and rewarded[0].metrics == {"gold": 0.5}
    assert rewarded[1] == failed
    assert rewarded[2].reward == 0.5  # truncated before the environment reported its terms


def test_unknown_auxiliary_term_is_named() -> None:
    with pytest.raises(RequestError, match="'paralel'") as caught:
        AuxiliaryRewards(weights={"paralel": 1.0}).add([(EPISODE,)], 1, 8)
    assert "finish, parallel" in caught.value.remedy


@pytest.mark.parametrize("section", [{}, {"weights": {}}, {"weights": {"a": 1.0}, "until": 0.0}])
def test_invalid_sections_are_refused(section: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        AuxiliaryRewards.model_validate(section)


@pytest.mark.parametrize("name", ["pkpo", "pass_at_k_training", "toggle"])
def test_algorithms_that_recognize_right_answers_refuse_auxiliary_rewards(name: str) -> None:
    """A wrong answer with a large term would count as right."""
    with pytest.raises(ValidationError, match=f"{name} recognizes right answers by their reward"):
        RLSpec(checkpoint="model", algorithm=name, auxiliary_rewards={"weights": {"digits": 1.0}})


def test_algorithms_that_recognize_right_answers_refuse_scaled_rewards() -> None:
    """With a scale of 0.5 no answer would count as right, and all groups would be dead."""
    mixture = {"id": "mixture", "parts": {"digits": {**DIGITS, "reward_scale": 0.5}}}
    with pytest.raises(RequestError, match=r"parts.digits.reward_scale: pkpo recognizes right answers"):
        load_plugin("rl").plan(make_job("rl", environment=mixture, algorithm={"name": "pkpo", "k": 2}))
    load_plugin("rl").plan(make_job("rl", environment=mixture))


def test_rl_with_auxiliary_rewards_reports_reward_and_gold(tmp_path: Path) -> None:
    auxiliary = {"weights": {"digits": 3.0}, "until": 1.0}
    bundle = run_task(tmp_path, "rl", steps=2, auxiliary_rewards=auxiliary)
    rows = episodes(bundle)
    for line, scale, (_, step) in zip(metrics(bundle), (1.0, 0.5), rows.groupby("step"), strict=True):
        digits = [figures_of(terms)["digits"] for terms in step["reward_terms"]]
        gold = [figures_of(figures)["gold"] for figures in step["metrics"]]
        assert gold == digits  # this environment's only term is its reward
        assert step["reward"].tolist() == pytest.approx([(1 + 3 * scale) * digit for digit in digits])
        assert line["reward"] == pytest.approx((1 + 3 * scale) * line["gold"]) and line["gold"] > 0
        assert line["auxiliary_scale"] == scale


def test_falling_auxiliary_weights_are_no_collapse(tmp_path: Path) -> None:
    bundle = run_task(
        tmp_path, "rl", steps=30, lr=1e-7, save_every=30,
        auxiliary_rewards={"weights": {"digits": 9.0}, "until": 1.0},
    )  # fmt: skip
    lines = metrics(bundle)
    assert lines[-1]["reward"] < lines[0]["reward"] / 3
    assert not any(line["collapse_alarm"] for line in lines)
    (warning,) = summary(bundle)["warnings"]
    assert f"went from {np.mean([line['gold'] for line in lines[:6]]):.3f} to" in warning
