"""Process rewards beside an algorithm's own advantages: what each segment of an answer has earned.

An episode that has them holds, at the last token of each segment, Phi(after) - Phi(before), with Phi = 0 at
the end (`verifiers.step_rewards`): Phi estimates the value of a prefix. Algorithms that take rewards a
token (`ppo`, `reinforce_pp`) use them as they are. For those that compare whole answers, `with_process`
changes the weights that they have given, in one of three ways; neither they nor the trainer know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from perilune.data.episode import Episode
from perilune.learn.advantages import DEAD_STD, STD_EPSILON
from perilune.learn.algorithms.base import Algorithm, PolicyGradient, StepContext
from perilune.learn.weights import Component, WeightedGroup
from perilune.verifiers.segments import SegmentSettings, spread_over_tokens
from perilune.verifiers.step_rewards import PASS_THRESHOLD, centered_returns

Tokens = NDArray[np.float64]
Segments = tuple[list[int], NDArray[np.float64]]
"""Where segments end, in tokens, and what each earned."""


class ProcessRewardSettings(BaseModel):
    """What process rewards do, whoever gives the values that they are made of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["bonus", "advantage", "trace", "reward"] = Field(
        "bonus",
        description="beside the algorithm's advantage; in its place (VinePPO's r + V' - V, or each segment's"
        " return against the mean of its answer); or, for ppo and reinforce_pp, as rewards",
    )
    weight: float = Field(0.2, gt=0, description="of a bonus, or of rewards, beside the outcome's")
    dead_only: bool = Field(False, description="a bonus only where the rewards of a group are all alike")
    segments: SegmentSettings = Field(SegmentSettings(), description="where answers are cut")

    def told(self) -> str:
        """What they are and what they take, in a line."""
        return f"as {self.role}, at most {self.segments.most} segments an answer"


class AnswerValues(ProcessRewardSettings):
    """Values from one forward pass: how likely the policy thinks the right answer after each segment."""

    name: Literal["answer"] = Field("answer", description="who says what a prefix is worth")
    lead: str | None = Field(
        None, description="text that makes the policy answer at once; by default the environment's"
    )
    floor: float | None = Field(
        None,
        lt=0,
        description="mean log-prob below which a prefix is worth nothing, in place of its exponential",
    )
    guessable: float = Field(
        0.5, gt=0, le=1, description="no process rewards where the answer is likelier than this at the start"
    )


class MonteCarloValues(ProcessRewardSettings):
    """Values from play: the mean verdict on continuations of each prefix (VinePPO, arXiv 2410.01679)."""

    name: Literal["montecarlo"] = Field("montecarlo", description="who says what a prefix is worth")
    role: Literal["bonus", "advantage", "trace", "reward"] = Field("advantage", description="as for answer")
    continuations: int = Field(9, ge=1, description="played from each prefix")

    def told(self) -> str:
        return f"{super().told()}, {self.continuations} continuations from the beginning of each"


class _OrName:
    """In a recipe the bare name stands for the section that has nothing else in it."""

    @staticmethod
    def __get_pydantic_json_schema__(core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"enum": ["answer", "montecarlo"]}, handler(core)]}


def _section(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


ProcessRewardField = Annotated[
    Annotated[AnswerValues | MonteCarloValues | None, Field(discriminator="name")],
    BeforeValidator(_section),
    _OrName(),
]
"""Type of a field that holds process rewards: none, `answer`, or `{name: montecarlo, continuations: 4}`."""


def segments_of(episode: Episode) -> Segments | None:
    """Where the segments of an episode end and what they earned; None where it has no process rewards."""
    if episode.step_rewards is None:
        return None
    ends = np.flatnonzero(~np.isnan(episode.step_rewards)) + 1
    earned = episode.step_rewards[ends - 1].astype(np.float64)
    return [*ends[:-1].tolist(), len(episode.token_ids)], earned


def apply_process_rewards(
    groups: Sequence[WeightedGroup],
    algorithm: Algorithm,
    context: StepContext,
    settings: ProcessRewardSettings | None,
) -> list[WeightedGroup]:
    """The weights of a step's groups with what their process rewards do to them.

    An episode without process rewards keeps the weights it has.

    * bonus: + weight * (x - mean) / std of all segments of the group before the last ones, where x is what a
      segment earned. The last segment, which gives the answer, has the outcome alone.
    * advantage: x, and at the last segment r + x, in place of the algorithm's advantage.
    * trace: the return of each segment less the mean of its own answer's, clipped.
    * reward: nothing; the algorithm has had them.
    """
    if settings is None:
        return list(groups)
    assert isinstance(algorithm, PolicyGradient)
    return [_of_group(group, algorithm, context, settings) for group in groups]


def _of_group(
    group: WeightedGroup, algorithm: PolicyGradient, context: StepContext, settings: ProcessRewardSettings
) -> WeightedGroup:
    parts = [None if one.failure else segments_of(one) for one in group.episodes]
    group = replace(group, figures={**group.figures, **_figures(group.episodes, parts)})
    own = group.policy_gradient
    if settings.role == "reward" or own is None or (settings.dead_only and not group.dead):
        return group
    scale = _SCALES[settings.role](group.episodes, parts, settings)
    there = [found if count else None for found, count in zip(scale, own.counts, strict=True)]
    nothing = [np.nan if found is None else found for found in there]
    spread_over = algorithm.component(group.episodes, nothing, context).weights
    weights = tuple(
        old if found is None else (old + new if settings.role == "bonus" else new)
        for old, new, found in zip(own.weights, spread_over, there, strict=True)
    )
    dead = group.dead and not any(found is not None and found.any() for found in there)
    return replace(group, policy_gradient=Component(weights, own.counts), dead=dead)


Scale = Sequence[Tokens | None]
Parts = Sequence[Segments | None]


def _bonus(episodes: Sequence[Episode], parts: Parts, settings: ProcessRewardSettings) -> Scale:
    inner = np.concatenate([np.zeros(0), *(part[1][:-1] for part in parts if part is not None)])
    std = float(inner.std(ddof=1)) if len(inner) > 1 else 0.0
    mean = float(inner.mean()) if len(inner) else 0.0
    factor = settings.weight / (std + STD_EPSILON) if std >= DEAD_STD else 0.0

    def of(part: Segments) -> Tokens:
        ends, earned = part
        return spread_over_tokens(ends, np.append((earned[:-1] - mean) * factor, 0.0))

    return [None if part is None else of(part) for part in parts]


def _with_outcome(episode: Episode, part: Segments) -> NDArray[np.float64]:
    """What each segment earned, the verdict on the whole at the last."""
    earned = part[1].copy()
    earned[-1] += episode.reward or 0.0
    return earned


def _advantage(episodes: Sequence[Episode], parts: Parts, settings: ProcessRewardSettings) -> Scale:
    return [
        None if part is None else spread_over_tokens(part[0], _with_outcome(one, part))
        for one, part in zip(episodes, parts, strict=True)
    ]


_CLIP = 4.0  # largest weight of a step, either way


def _trace(episodes: Sequence[Episode], parts: Parts, settings: ProcessRewardSettings) -> Scale:
    return [
        None
        if part is None
        else spread_over_tokens(part[0], centered_returns(_with_outcome(one, part), clip=_CLIP))
        for one, part in zip(episodes, parts, strict=True)
    ]


_SCALES: Mapping[str, Callable[[Sequence[Episode], Parts, ProcessRewardSettings], Scale]] = {
    "bonus": _bonus,
    "advantage": _advantage,
    "trace": _trace,
}


def _figures(episodes: Sequence[Episode], parts: Parts) -> dict[str, float]:
    """What a group's process rewards are like, where it has any; averaged over the groups of a step.

    Returns:
        process/without: share of judged episodes that have none; and of those that have some:
        process/segments: of an answer; process/std: of what segments before the last earned;
        process/agreement: how often a right answer's last value is above a wrong one's (0.5 is chance);
        process/setbacks: share of segments of right answers that lost value.
    """
    judged = [(one, part) for one, part in zip(episodes, parts, strict=True) if not one.failure]
    having = [(one, part) for one, part in judged if part is not None]
    if not having:
        return {"process/without": 1.0} if judged else {}
    inner = np.concatenate([part[1][:-1] for _, part in having])
    figures = {
        "process/without": 1 - len(having) / len(judged),
        "process/segments": float(np.mean([len(part[1]) for _, part in having])),
        "process/std": float(inner.std(ddof=1)) if len(inner) > 1 else 0.0,
    }
    right = [part for one, part in having if (one.reward or 0.0) >= PASS_THRESHOLD]
    wrong = [part for one, part in having if (one.reward or 0.0) < PASS_THRESHOLD]
    if right and wrong:
        gap = np.subtract.outer([-part[1][-1] for part in right], [-part[1][-1] for part in wrong])
        figures["process/agreement"] = float(np.mean((gap > 0) + (gap == 0) / 2))
    steps = np.concatenate([np.zeros(0), *(part[1][:-1] for part in right)])
    if len(steps):
        figures["process/setbacks"] = float((steps < 0).mean())
    return figures
