"""The explanation for a run that learned little."""

from typing import Any

import pytest

from perilune.tasks.checks.little_learned import little_learned_warning


def lines(rates: list[float], dead: float = 0.2, truncated: float = 0.0) -> list[dict[str, Any]]:
    return [
        {
            "reward": rate,
            "reward_std": (rate * (1 - rate)) ** 0.5,
            "pass_rate": rate,
            "dead_groups": dead,
            "truncated": truncated,
        }
        for rate in rates
    ]


FLAT = [0.04] * 20


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (lines(FLAT, dead=0.86), "86% of the groups had no gradient, because all answers were wrong: train"),
        (lines([0.8] * 20, dead=0.7), "because all answers were right: choose harder tasks"),
        (lines(FLAT, truncated=0.5), "The token limit cut off 50% of the answers: raise max_tokens."),
        (lines(FLAT), "80% of the groups had a gradient, so more may be learned with more steps"),
        (lines([0.5] * 10 + [0.2] * 10), "went from 0.500 to 0.200"),
    ],
)
def test_little_learned_names_the_cause(steps: list[dict[str, Any]], said: str) -> None:
    assert said in little_learned_warning(steps, 64)


@pytest.mark.parametrize("rates", [[0.1] * 10 + [0.3] * 10, [0.95] * 20, [0.04] * 9])
def test_little_learned_is_empty_for_gains_solved_tasks_and_short_runs(rates: list[float]) -> None:
    assert little_learned_warning(lines(rates, dead=0.9), 64) == ""


def test_gain_within_two_standard_errors_counts_as_none() -> None:
    """A rise within two standard errors counts as none."""
    assert little_learned_warning(lines([0.30] * 10 + [0.31] * 10), 64)
    assert not little_learned_warning(lines([0.30] * 10 + [0.31] * 10), 64_000)
