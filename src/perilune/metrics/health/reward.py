"""Rules that judge the reward of a run."""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple

from perilune.metrics.health.evidence import SOLVED_PASS_RATE, TRUNCATED_SHARE, Evidence, Finding
from perilune.metrics.health.series import Series, Values, find_shifts, flag_at_least, latest

FAILED_SHARE = 0.05  # share of episodes without a score
FALL_SHARE = 0.4  # of the mean reward
JUMP_SIGMAS = 3.0  # standard deviations, in two steps running
TREND_SIGMAS = 4.0  # standard errors of a trend
TREND_WINDOW_STEPS = 8  # steps of a mean of a trend
COLLAPSE_WINDOW_STEPS = 10  # steps of a mean of the run's own watch
VERIFIER_BY_HAND = "run the verifier on one episode by hand, and read the log: perilune logs RUN"


def find_collapse(run: Evidence) -> Iterator[Finding]:
    """Find a run whose own watch says that the reward has collapsed and not recovered."""
    metrics = run.metrics
    since = metrics.alarm_since("collapse_alarm")
    if since is not None:
        remedy = "lower lr, set kl, or continue from an earlier checkpoint"
        if metrics.since(_flag_unexplained_falls(metrics)) is not None:
            remedy += f"; the reward fell at once and length and entropy stayed, so also {VERIFIER_BY_HAND}"
        yield Finding("collapse", "broken", since, f"the reward collapsed{_fall_from_best(metrics)}", remedy)


def _fall_from_best(metrics: Series) -> str:
    """Return the latest and the best mean reward, as the end of a sentence."""
    is_auxiliary = latest(metrics.column("auxiliary_scale")) is not None  # as in the run's own watch
    values = metrics.column("gold" if is_auxiliary else "reward")
    known = [value for value in values if value is not None]
    ends = range(COLLAPSE_WINDOW_STEPS, len(known) + 1)
    means = [fmean(known[end - COLLAPSE_WINDOW_STEPS : end]) for end in ends]
    if not means:
        return ""
    return f": {means[-1]:.3g} over the last {COLLAPSE_WINDOW_STEPS} steps, {max(means):.3g} at its best"


def find_reward_hack(run: Evidence) -> Iterator[Finding]:
    """Find a reward that rises while its goal falls: the gold score, or else the pass rate."""
    reward = run.metrics.column("reward")
    for name, label in (("gold", "gold score"), ("pass_rate", "pass rate")):
        truth = run.metrics.column(name)
        if not any(value is not None for value in truth):
            continue
        down = find_shifts(truth, sigmas=JUMP_SIGMAS, least=0.1, sticky=-1)
        up = find_shifts(reward, sigmas=JUMP_SIGMAS, least=0.02, sticky=0)
        since = run.metrics.since(_flag_falls(down, [sign > 0 for sign in up], accompanied=True))
        if since is None:
            since = run.metrics.since(_flag_divergence(reward, truth))
        if since is not None:
            yield Finding(
                "reward hack",
                "broken",
                since,
                f"the reward rises to {latest(reward):.3g} while the {label} falls to {latest(truth):.3g}",
                "stop, and read the episodes with the highest reward; perilune environments audit RECIPE",
            )
        return  # the pass rate is a stand-in for a missing gold score


def find_over_optimization(run: Evidence) -> Iterator[Finding]:
    """Find a reward that goes on rising after the run's own watch saw the gold score stop rising.

    The alarm alone is no finding: it also comes when the tasks are solved, and when the weights of auxiliary
    rewards fall.
    """
    metrics = run.metrics
    alarm = metrics.alarm_since("overoptimisation_alarm")
    if alarm is None or latest(metrics.column("auxiliary_scale")) is not None:
        return
    place = metrics.steps.index(alarm)
    reward, gold, passed = (metrics.column(name) for name in ("reward", "gold", "pass_rate"))
    flags = [
        index > place
        and (passed[index] or 0.0) < SOLVED_PASS_RATE
        and _rises(reward, place, index)
        and not _rises(gold, place, index)
        for index in range(len(reward))
    ]
    if metrics.since(flags) is not None:
        yield Finding(
            "over-optimization",
            "watch",
            alarm,
            f"the gold score no longer rises ({latest(gold):.3g}), and the reward still does",
            f"stop; train again with a lower lr, or with steps: {alarm}",
        )


def find_reward_error(run: Evidence) -> Iterator[Finding]:
    """Find a verifier that fails, returns one value for all answers, or changed although answers did not."""
    metrics = run.metrics
    failures, groups = metrics.column("failures"), metrics.column("groups")
    shares = [
        None if failed is None or not number else failed / (number * run.samples)
        for failed, number in zip(failures, groups, strict=True)
    ]
    since = metrics.since(flag_at_least(shares, FAILED_SHARE))
    if since is not None:
        why = f"{latest(shares):.0%} of the episodes got no score"
        yield Finding("reward error", "broken", since, why, VERIFIER_BY_HAND)
    reward, unexplained = metrics.column("reward"), _flag_unexplained_falls(metrics)
    is_collapsed = metrics.alarm_since("collapse_alarm") is not None
    constant = _flag_constant_rewards(metrics)
    if is_collapsed:  # a policy that writes only nonsense gets equal rewards, too
        constant = [one and other for one, other in zip(constant, unexplained, strict=True)]
    since = metrics.since(constant)
    if since is not None:
        why = f"every answer gets the reward {latest(reward):.3g}, and rewards differed before"
        yield Finding("reward error", "broken", since, why, VERIFIER_BY_HAND)
        return
    since = metrics.since(unexplained)
    if since is not None and not is_collapsed:  # the run's own alarm is surer than this guess
        why = f"the reward fell at once to {latest(reward):.3g}; length and entropy did not change"
        yield Finding("reward error", "broken", since, why, VERIFIER_BY_HAND)


def _flag_jumps(metrics: Series) -> list[int]:
    return find_shifts(metrics.column("reward"), sigmas=JUMP_SIGMAS, least=0.1, share=FALL_SHARE, sticky=-1)


def _flag_constant_rewards(metrics: Series) -> list[bool]:
    """Flag steps with equal rewards, after their mean jumped and although they differed before.

    Answers that the token limit cuts off have equal rewards, too.
    """
    deviations, truncated = metrics.column("reward_std"), metrics.column("truncated")
    varied = accumulate((value not in (None, 0.0) for value in deviations), max)
    return [
        value == 0.0 and before and jump != 0 and (cut or 0.0) < TRUNCATED_SHARE
        for value, before, jump, cut in zip(deviations, varied, _flag_jumps(metrics), truncated, strict=True)
    ]


def _flag_unexplained_falls(metrics: Series) -> list[bool]:
    """Flag the steps of a fall of the reward at whose start neither length nor entropy changed."""
    changed = [
        find_shifts(metrics.column("length"), sigmas=JUMP_SIGMAS, least=1.0, sticky=0),
        find_shifts(metrics.column("entropy"), sigmas=JUMP_SIGMAS, least=0.02, sticky=0),
    ]
    explained = [any(signs) for signs in zip(*changed, strict=True)]
    return _flag_falls(_flag_jumps(metrics), explained, accompanied=False)


def _flag_falls(shifts: Sequence[int], events: Sequence[bool], *, accompanied: bool) -> list[bool]:
    """Flag the steps of each fall below the baseline that an event accompanies, or that none accompanies.

    An event accompanies a fall if it holds at the first step of the fall, or at the step after.
    """
    flags: list[bool] = []
    began = 0
    for index, sign in enumerate(shifts):
        if sign < 0 and not (flags and shifts[index - 1] < 0):
            began = index
        flags.append(sign < 0 and any(events[began : min(index, began + 1) + 1]) == accompanied)
    return flags


def _flag_divergence(reward: Values, truth: Values) -> list[bool]:
    """Flag steps where truth is clearly below its best mean, and reward above its mean at that time."""
    flags: list[bool] = []
    best: tuple[Mean, Mean] | None = None
    for step in range(len(truth)):
        true, paid = _recent_mean(truth, step), _recent_mean(reward, step)
        if true is None or paid is None:
            flags.append(False)
            continue
        if best is None or true.value > best[0].value:
            best = true, paid
        fell = _is_above(best[0], true) and best[0].value - true.value > 0.1 * abs(best[0].value)
        flags.append(fell and _is_above(paid, best[1]))
    return flags


def _rises(values: Values, before: int, now: int) -> bool:
    """Return whether the mean of the steps up to `now` is clearly above the mean of those up to `before`."""
    old, new = _recent_mean(values, before), _recent_mean(values, now)
    return old is not None and new is not None and _is_above(new, old)


class Mean(NamedTuple):
    """A mean and its variance, the square of its standard error."""

    value: float
    variance: float


def _recent_mean(values: Values, end: int) -> Mean | None:
    """Return the mean of the last steps up to the index `end`; None if one of them is unknown."""
    recent = [value for value in values[max(0, end + 1 - TREND_WINDOW_STEPS) : end + 1] if value is not None]
    if len(recent) < TREND_WINDOW_STEPS:
        return None
    mean = fmean(recent)
    return Mean(mean, math.fsum((value - mean) ** 2 for value in recent) / TREND_WINDOW_STEPS**2)


def _is_above(higher: Mean, lower: Mean) -> bool:
    """Return whether one mean is clearly above the other."""
    return higher.value - lower.value > TREND_SIGMAS * math.sqrt(higher.variance + lower.variance)
