"""Process rewards in addition to an algorithm's advantages: rewards for the segments of an answer.

`Episode.step_rewards` holds, at the last token of each segment, V(after) - V(before), where V estimates the
value of a prefix and is 0 at the end (`verifiers.step_rewards`). Algorithms with token-level rewards
(`takes_step_rewards`) use these differences directly. For other algorithms, `apply_process_rewards` changes
the token weights afterwards, in one of three ways.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from perilune.data.episode import Episode
from perilune.environments.core.rewards import GOLD_METRIC
from perilune.frozen import Frozen
from perilune.learn.advantages import DEAD_STD, STD_EPSILON, spread
from perilune.learn.algorithms.base import Algorithm, PolicyGradient, StepContext
from perilune.learn.name_or_section import NameOrSection
from perilune.learn.weights import Component, WeightedGroup
from perilune.verifiers.segments import SegmentSettings, spread_over_tokens
from perilune.verifiers.step_rewards import PASS_THRESHOLD, compute_centered_returns

Tokens = NDArray[np.float64]
Segments = tuple[list[int], NDArray[np.float64]]
"""The ends of the segments, in tokens, and their rewards."""


class ProcessRewardSettings(Frozen):
    """Settings of all kinds of process rewards."""

    role: Literal["bonus", "advantage", "trace", "reward"] = Field(
        "bonus",
        description="use of the process rewards. bonus: add them to the algorithm's advantages;"
        " advantage: replace the advantages by VinePPO's r + V' - V; trace: replace the"
        " advantage of each segment by its return minus the mean return of the segments of its"
        " answer; reward: token-level rewards, for ppo, reinforce_pp, reinforce_pp_baseline"
        " and gigpo",
    )
    weight: float = Field(
        0.2,
        gt=0,
        description="coefficient of the process rewards in the roles bonus and reward; the other roles"
        " ignore it",
    )
    dead_only: bool = Field(
        False,
        description="use the process rewards only in groups whose rewards are all equal; role: reward"
        " ignores it",
    )
    segments: SegmentSettings = Field(SegmentSettings(), description="how answers are split into segments")

    def describe(self) -> str:
        """Return the settings in one line, for the plan."""
        return f"as {self.role}, at most {self.segments.most} segments an answer"


class AnswerValues(ProcessRewardSettings):
    """Values from one forward pass: the policy's log-prob of the right answer after each segment."""

    name: Literal["answer"] = Field("answer", description="method that estimates the value of a prefix")
    lead: str | None = Field(
        None,
        description="text after a prefix that makes the policy answer at once; default: the environment's"
        " text",
    )
    floor: float | None = Field(
        None,
        lt=0,
        description="value of a prefix. null: exp(V), where V is the mean log-prob of the right answer's"
        " tokens, in nats; a number: V with this lower bound, divided by -floor",
    )
    guessable: float = Field(
        0.5,
        gt=0,
        le=1,
        description="an episode gets no process rewards if exp(V), as in `floor`, exceeds this before the"
        " first segment",
    )


class MonteCarloValues(ProcessRewardSettings):
    """Monte Carlo values: the mean verdict on continuations of each prefix (VinePPO, arXiv 2410.01679)."""

    name: Literal["montecarlo"] = Field(
        "montecarlo", description="method that estimates the value of a prefix"
    )
    role: Literal["bonus", "advantage", "trace", "reward"] = Field(
        "advantage", description="as `role` of process_rewards: answer"
    )
    continuations: int = Field(9, ge=1, description="continuations sampled from each prefix")

    def describe(self) -> str:
        return f"{super().describe()}, {self.continuations} continuations from the beginning of each"


ProcessRewardField = Annotated[
    Annotated[AnswerValues | MonteCarloValues | None, Field(discriminator="name")],
    NameOrSection(("answer", "montecarlo")),
]
"""Type of a field that holds process rewards: none, `answer`, or `{name: montecarlo, continuations: 4}`."""


def reward_segments(episode: Episode) -> Segments | None:
    """Return the segments of an episode with their rewards, or None without process rewards."""
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
    """Change the weights of a step's groups by their process rewards.

    Let x be the reward of a segment and r the reward of the answer. Episodes without process rewards keep
    their weights.

    * bonus: adds weight * (x - mean) / std, with the mean and std of all segments of the group except the
      last ones. The last segment contains the answer and gets no bonus.
    * advantage: replaces the algorithm's advantage by x, and by r + x at the last segment.
    * trace: replaces it by the return of each segment minus the mean of its answer, clipped.
    * reward: changes nothing, because the algorithm has already used the rewards.
    """
    if settings is None:
        return list(groups)
    assert isinstance(algorithm, PolicyGradient)
    return [_apply_to_group(group, algorithm, context, settings) for group in groups]


def _apply_to_group(
    group: WeightedGroup, algorithm: PolicyGradient, context: StepContext, settings: ProcessRewardSettings
) -> WeightedGroup:
    parts = [None if episode.failure else reward_segments(episode) for episode in group.episodes]
    group = replace(group, figures={**group.figures, **_figures(group.episodes, parts)})
    component = group.policy_gradient
    if settings.role == "reward" or component is None or (settings.dead_only and not group.dead):
        return group
    compute_scale = _bonus_scale if settings.role == "bonus" else _value_scale
    scale = compute_scale(group.episodes, parts, settings)
    used = [values if count else None for values, count in zip(scale, component.counts, strict=True)]
    with_nan = [np.nan if values is None else values for values in used]
    scaled = algorithm.component(group.episodes, with_nan, context).weights
    weights = tuple(
        old if values is None else (old + new if settings.role == "bonus" else new)
        for old, new, values in zip(component.weights, scaled, used, strict=True)
    )
    dead = group.dead and not any(values is not None and values.any() for values in used)
    return replace(group, policy_gradient=Component(weights, component.counts), dead=dead)


Scale = Sequence[Tokens | None]
Parts = Sequence[Segments | None]


def _bonus_scale(episodes: Sequence[Episode], parts: Parts, settings: ProcessRewardSettings) -> Scale:
    inner = np.concatenate([np.zeros(0), *(part[1][:-1] for part in parts if part is not None)])
    std = spread(inner)
    mean = float(inner.mean()) if len(inner) else 0.0
    factor = settings.weight / (std + STD_EPSILON) if std >= DEAD_STD else 0.0

    def of(part: Segments) -> Tokens:
        ends, earned = part
        return spread_over_tokens(ends, np.append((earned[:-1] - mean) * factor, 0.0))

    return [None if part is None else of(part) for part in parts]


def _add_outcome(episode: Episode, part: Segments) -> NDArray[np.float64]:
    """Return the rewards of the segments, with the answer's reward added to the last one."""
    earned = part[1].copy()
    earned[-1] += episode.reward or 0.0
    return earned


_MAX_RETURN = 4.0  # largest absolute value of a centred return


def _value_scale(episodes: Sequence[Episode], parts: Parts, settings: ProcessRewardSettings) -> Scale:
    """Return the scale of the roles advantage and trace."""

    def of(episode: Episode, part: Segments) -> Tokens:
        earned = _add_outcome(episode, part)
        is_trace = settings.role == "trace"
        return spread_over_tokens(
            part[0], compute_centered_returns(earned, clip=_MAX_RETURN) if is_trace else earned
        )

    return [None if part is None else of(e, part) for e, part in zip(episodes, parts, strict=True)]


def _figures(episodes: Sequence[Episode], parts: Parts) -> dict[str, float]:
    """Return the figures of one group; a step reports their mean over groups.

    Returns:
        process/without: share of judged episodes without process rewards. Over the others:
        process/segments: mean number of segments; process/std: standard deviation of the rewards of all
        segments before the last; process/agreement: probability that a right answer's last value is above a
        wrong answer's (0.5 is chance); process/setbacks: share of right answers' segments that lost value.
    """
    judged = [(episode, part) for episode, part in zip(episodes, parts, strict=True) if not episode.failure]
    rewarded = [(episode, part) for episode, part in judged if part is not None]
    if not rewarded:
        return {"process/without": 1.0} if judged else {}
    inner = np.concatenate([part[1][:-1] for _, part in rewarded])
    figures = {
        "process/without": 1 - len(rewarded) / len(judged),
        "process/segments": float(np.mean([len(part[1]) for _, part in rewarded])),
        "process/std": spread(inner),
    }
    right: list[Segments] = []
    wrong: list[Segments] = []
    for episode, part in rewarded:
        score = episode.metrics.get(GOLD_METRIC, episode.reward or 0.0)
        (right if score >= PASS_THRESHOLD else wrong).append(part)
    if right and wrong:  # V is 0 at the end, so the last value is minus the reward of the last segment
        gap = np.subtract.outer([-part[1][-1] for part in right], [-part[1][-1] for part in wrong])
        figures["process/agreement"] = float(np.mean((gap > 0) + (gap == 0) / 2))
    steps = np.concatenate([np.zeros(0), *(part[1][:-1] for part in right)])
    if len(steps):
        figures["process/setbacks"] = float((steps < 0).mean())
    return figures
