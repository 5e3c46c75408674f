"""Learnability: whether RL can start on an environment, judged by an evaluation."""

from typing import Any

import pytest

from perilune.data.episode import Episode
from perilune.metrics.learnability import assess_learnability
from perilune.tasks.stage.outcomes import evaluation_summary


def summary(groups: list[list[float]], *, length: int = 3, cut_off: bool = False) -> dict[str, Any]:
    """The summary of an evaluation whose groups have these rewards."""
    import numpy as np

    def episode(task: int, sample: int, reward: float) -> Episode:
        return Episode(
            episode_id=f"0/{task}/{sample}",
            group_id=f"0/{task}",
            task_id=f"t{task}",
            environment="e",
            seed=0,
            messages=({"role": "user", "content": "?"},),
            prompt_ids=np.zeros(1, np.int32),
            token_ids=np.zeros(length, np.int32),
            loss_mask=np.ones(length, bool),
            logprobs=np.zeros(length, np.float32),
            policy_version=np.zeros(length, np.int32),
            finish_reason="length" if cut_off else "stop",
            reward=reward,
        )

    made = [
        [episode(task, sample, reward) for sample, reward in enumerate(rewards)]
        for task, rewards in enumerate(groups)
    ]
    return evaluation_summary("e", made, [group[0] for group in made], seed=0)


DEAD, SOLVED, LIVE = [0.0] * 8, [1.0] * 8, [1.0, *[0.0] * 7]


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([DEAD] * 64, "SFT first, or easier tasks: 0 of 512 answers passed, 0% of groups are live"),
        ([SOLVED] * 64, "already solved"),
        ([SOLVED] * 48 + [DEAD] * 15 + [LIVE], "nearly solved: 385 of 512 answers passed"),
        ([DEAD] * 40 + [LIVE] * 24, "RL can start"),
        ([DEAD] * 58 + [LIVE] * 6, "RL can start slowly: 6 of 512 answers passed, 9% of groups are live"),
        (
            [[0.1, *[0.2] * 7]] * 30 + [DEAD] * 34,
            "RL can start",
        ),  # partial credit varies although no answer passes
    ],
)
def test_verdict_follows_rewards_of_groups(groups: list[list[float]], said: str) -> None:
    assert assess_learnability(summary(groups)).verdict.startswith(said)


def test_verdict_names_the_cause_of_failure() -> None:
    assert (
        "raise max_tokens, which cut off 100%"
        in assess_learnability(summary([DEAD] * 8, cut_off=True)).verdict
    )
    unformed = {**summary([DEAD] * 8), "format": 0.01}
    assert "ask for the form of the answer, which 1% have" in assess_learnability(unformed).verdict


def test_live_group_share_has_an_interval() -> None:
    result = assess_learnability(summary([LIVE] * 16 + [DEAD] * 48))
    assert result.live is not None and result.live.mean == 0.25
    assert 0.15 < result.live.low < 0.17 and 0.36 < result.live.high < 0.38  # Wilson, 16 of 64
    assert result.pass_at_1.mean == pytest.approx(16 / 512)
    assert result.pass_at_k is not None and result.pass_at_k.mean == 0.25
    assert "live_groups" not in summary([[1.0], [0.0]])  # a group of one sample cannot be live
