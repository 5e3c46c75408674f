"""Explains why a policy learned little: groups without a gradient, or answers cut off."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from perilune.metrics.learnability import SOLVED_PASS_RATE
from perilune.tasks.checks.collapse import lasting_reward

MIN_STEPS = 10  # steps below which nothing is concluded
MIN_RISE_ERRORS = 2.0  # standard errors by which the reward must rise
HIGH_DEAD_SHARE = 0.6  # share of dead groups that explains a slow climb
HIGH_TRUNCATED_SHARE = 0.3  # share of answers at the token limit that explains it


def little_learned_warning(lines: Sequence[Mapping[str, Any]], episodes: int) -> str:
    """Return a warning with causes and remedies if the reward in training did not rise clearly, else "".

    The mean rewards of the first and the last fifth of the steps are compared.

    Args:
        lines: the metrics of all steps.
        episodes: number of episodes in a step.
    """
    if len(lines) < MIN_STEPS:
        return ""
    edge = len(lines) // 5
    parts = lines[:edge], lines[-edge:]
    first, last = (fmean(map(lasting_reward, part)) for part in parts)
    error = math.hypot(*(_mean(part, "reward_std") for part in parts)) / math.sqrt(edge * episodes)
    if last - first > MIN_RISE_ERRORS * error or _mean(parts[0], "pass_rate") > SOLVED_PASS_RATE:
        return ""
    return f"the mean reward in training went from {first:.3f} to {last:.3f}. {' '.join(_causes(lines))}"


def _causes(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    rate, dead, cut_off = (_mean(lines, name) for name in ("pass_rate", "dead_groups", "truncated"))
    causes = []
    if dead > HIGH_DEAD_SHARE:
        alike, remedy = (
            ("wrong", "train longer on traces first, choose easier tasks or a curriculum, or raise samples")
            if rate < 0.5
            else ("right", "choose harder tasks, or a curriculum")
        )
        causes.append(
            f"{dead:.0%} of the groups had no gradient, because all answers were {alike}: {remedy}."
        )
    if cut_off > HIGH_TRUNCATED_SHARE:
        causes.append(f"The token limit cut off {cut_off:.0%} of the answers: raise max_tokens.")
    return causes or [
        f"{1 - dead:.0%} of the groups had a gradient, so more may be learned with more steps or another lr."
    ]


def _mean(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    return fmean(line[name] for line in lines)
