"""The trace verifier: what each step of an answer earned, beside what its end is worth.

A step's reward is  potential * (gamma Phi(after) - Phi(before)) + local * g + environment * e,  and at the
last step also terminal * U. The first term is potential-based shaping (Ng, Harada and Russell 1999): with
Phi = 0 at the end it adds -Phi(start) to every discounted return, whatever was done, so that the best policy
stays the best. Hence Phi is bounded before the difference is taken, never the difference itself, and whatever
a caller says of the end is replaced by 0.

Whether the answer is right is said by the environment's verdict alone. A potential is a guess about progress,
and a row of data says nothing about its own worth.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from perilune.environments.protocol import Outcome, Score
from perilune.errors import WorkFailedError

Steps = NDArray[np.float64]

PASSES = 0.99
"""Utility from which an answer counts as right."""


class TraceSettings(BaseModel):
    """How steps are weighed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    potential: float = Field(1.0, ge=0, description="weight of progress")
    local: float = Field(1.0, ge=0, description="weight of a step's own score")
    environment: float = Field(1.0, ge=0, description="weight of what the environment gave for a step")
    terminal: float = Field(1.0, ge=0, description="weight of the verdict on the whole, at the last step")
    gamma: float = Field(0.99, gt=0, le=1, description="discount of a step")
    bounds: tuple[float, float] = Field((0.0, 1.0), description="between which a potential counts")
    scale: float = Field(1.0, gt=0, description="divides what a step did better than the mean")
    clip: float = Field(4.0, gt=0, description="largest weight of a step, either way")


@dataclass(frozen=True, slots=True, eq=False)
class TraceVerdict:
    """What the verifier says of a trace of T steps.

    Attributes:
        success: whether the answer is right; None when nobody could tell.
        utility: the verdict's reward, None when nobody could tell.
        rewards: float64[T], what each step earned.
        weights: float64[T], return of each step against the mean of its trace; all 0 without a verdict.
    """

    success: bool | None
    utility: float | None
    rewards: Steps
    weights: Steps


def judge_trace(
    outcome: Outcome,
    potentials: Sequence[float],
    settings: TraceSettings | None = None,
    *,
    local: Sequence[float] | None = None,
    environment: Sequence[float] | None = None,
) -> TraceVerdict:
    """Weigh the steps of one trace.

    Args:
        outcome: the scorer's verdict on the whole. There is no other way to say that a trace succeeded.
        potentials: [T + 1], before the first step and after each; what is said of the end does not count.
        local, environment: [T] each, 0 when left out.

    Raises:
        ValueError: when the lengths do not fit, or there is no step.
        WorkFailedError: when a figure is not finite.
    """
    settings = settings or TraceSettings()
    count = len(potentials) - 1
    if count < 1:
        raise ValueError(f"a trace of {len(potentials)} potentials has no step")
    phi, g, e = (
        _finite(name, values, size)
        for name, values, size in (
            ("potentials", potentials, count + 1),
            ("local", local or [0.0] * count, count),
            ("environment", environment or [0.0] * count, count),
        )
    )
    earned = settings.potential * shaping(phi, settings.bounds, settings.gamma)
    earned += settings.local * g + settings.environment * e
    if not isinstance(outcome, Score):
        return TraceVerdict(None, None, earned, np.zeros(count))
    earned[-1] += settings.terminal * _finite("utility", [outcome.reward], 1)[0]
    weights = against_own_mean(earned, settings.gamma, settings.scale, settings.clip)
    return TraceVerdict(outcome.reward >= PASSES, outcome.reward, earned, weights)


def shaping(potentials: Steps, bounds: tuple[float, float], gamma: float = 1.0) -> Steps:
    """float64[T]: gamma Phi(after) - Phi(before) of each step, from float64[T + 1] of Phi, 0 at the end."""
    phi = np.clip(potentials, *bounds).astype(np.float64)
    phi[-1] = 0.0
    return np.asarray(gamma * phi[1:] - phi[:-1])


def against_own_mean(rewards: Steps, gamma: float = 1.0, scale: float = 1.0, clip: float = math.inf) -> Steps:
    """float64[T]: clip((G - b) / scale) with G the return of each step, b their mean; b is 0 for one step."""
    returns = np.zeros(len(rewards))
    later = 0.0
    for t in range(len(rewards))[::-1]:
        later = returns[t] = rewards[t] + gamma * later
    baseline = returns.mean() if len(returns) > 1 else 0.0
    return np.clip((returns - baseline) / scale, -clip, clip)


def similarity(expected: str, steps: Sequence[str]) -> list[float]:
    """[T + 1] potentials: how alike `expected` and the text so far are, 0 to 1 (difflib's ratio).

    Progress for want of anything better; that a text looks like the answer does not make it right.
    """
    texts = ["".join(steps[:count]) for count in range(len(steps) + 1)]
    return [difflib.SequenceMatcher(None, expected, text, autojunk=False).ratio() for text in texts]


def _finite(name: str, values: Sequence[float], size: int) -> Steps:
    found = np.asarray(values, dtype=np.float64)
    if found.shape != (size,):
        raise ValueError(f"{name}: {found.shape} figures for {size}")
    if not np.isfinite(found).all():
        raise WorkFailedError(
            f"a step's {name} is {found[~np.isfinite(found)][0]}", remedy="give finite figures"
        )
    return found
