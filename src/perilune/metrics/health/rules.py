"""Rules that find problems of a training run, each with the step at which it began."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from perilune.metrics.health.series import BASELINE_STEPS, Series, Values, find_shifts, flag_at_least, median
from perilune.metrics.rounding import ROUNDING, Rounding
from perilune.metrics.training import STEP_PARTS

DEAD_GROUP_SHARE = 0.5  # share of dead groups
SOLVED_GROUPS_PASS_RATE = 0.8  # pass rate from which groups are dead because their tasks are solved
TRUNCATED_SHARE = 0.25  # share of answers
FAILED_SHARE = 0.05  # share of episodes without a score
WAIT_SHARE = 0.8  # share of a step that the learner waits for episodes
HEARTBEAT_TIMEOUT_S = 8.0  # seconds; a worker counts every second
SLOW_STEP_FACTOR = 6.0  # times the median step
Z_90 = 1.2816  # one-sided 90% of a normal distribution
FALL_SHARE = 0.4  # of the mean reward
JUMP_SIGMAS = 3.0  # standard deviations, in two steps running
TREND_SIGMAS = 4.0  # standard errors of a trend
TREND_WINDOW_STEPS = 8  # steps of a mean of a trend

Status = Literal["healthy", "watch", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a run.

    Attributes:
        name: a short name, such as "dead groups".
        since: the step at which it began; None if it is not a matter of steps.
        why: the observation, with figures.
        remedy: what to do.
    """

    name: str
    status: Status
    since: int | None
    why: str
    remedy: str


@dataclass(frozen=True)
class Evidence:
    """The input of the rules.

    Attributes:
        metrics, timings: the lines of metrics.jsonl and timings.jsonl.
        samples: samples of a group; 1 if unknown.
        max_staleness: bound on the age of a token in updates, if the run has one.
        rounding: the bounds of the run's own check on the log-probs of engine and learner.
        open_seconds: time since the last line of a live run; None for a run that has ended.
        silent_seconds: time since the last heartbeat of a live run; None if that is not known.
    """

    metrics: Series
    timings: Series = field(default_factory=lambda: Series([]))
    samples: int = 1
    max_staleness: float | None = None
    rounding: Rounding = ROUNDING["float32", "cpu"]
    open_seconds: float | None = None
    silent_seconds: float | None = None


def find_dead_groups(run: Evidence) -> Iterator[Finding]:
    """Find a run in which most groups have equal rewards, and not because their tasks are solved."""
    dead, groups = run.metrics.column("dead_groups"), run.metrics.column("groups")
    passed = run.metrics.column("pass_rate")
    flags = []
    for index, value in enumerate(dead):
        number = sum(count or 1.0 for count in groups[max(0, index - 1) : index + 1])
        is_solved = (passed[index] or 0.0) >= SOLVED_GROUPS_PASS_RATE
        flags.append(
            value is not None and not is_solved and _is_clearly_above(value, number, DEAD_GROUP_SHARE)
        )
    since = run.metrics.since(flags)
    if since is not None:
        rate = _latest(passed) or 0.0
        cause, remedy = "almost no answer is right", "use easier tasks, a curriculum, or more SFT"
        if rate >= 0.2:
            cause = f"{rate:.0%} of the answers are right, but most tasks get equal answers"
            remedy = "try a higher temperature, a lower lr, or an entropy bonus"
        yield Finding(
            "dead groups",
            "watch",
            since,
            f"{_latest(dead):.0%} of the groups have equal rewards and give no gradient: {cause}",
            remedy,
        )


def find_truncation(run: Evidence) -> Iterator[Finding]:
    """Find a token limit that cuts off many answers."""
    values = run.metrics.column("truncated")
    since = run.metrics.since(flag_at_least(values, TRUNCATED_SHARE))
    if since is not None:
        yield Finding(
            "truncation",
            "watch",
            since,
            f"the token limit cuts off {_latest(values):.0%} of the answers",
            "raise max_tokens, or penalize length with a reward term",
        )


def find_logprob_gap(run: Evidence) -> Iterator[Finding]:
    """Find an engine and a learner that disagree on the same tokens and weights."""
    names = ("logprob_gap_max", "logprob_gap_mean", "logprob_gap_kl")
    gaps = [[value or 0.0 for value in run.metrics.column(name)] for name in names]
    since = run.metrics.since([not run.rounding.allows_statistics(*step) for step in zip(*gaps, strict=True)])
    if since is not None:
        largest, mean, _ = (values[-1] for values in gaps)
        yield Finding(
            "log-prob gap",
            "broken",
            since,
            f"engine and learner differ by {mean:.2g} nats on average and by {largest:.2g} nats at most;"
            f" {run.rounding}",
            "stop: the policy gradient is biased. perilune doctor; compare dtypes and kernels",
        )


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
                f"the reward rises to {_latest(reward):.3g} while the {label} falls to {_latest(truth):.3g}",
                "stop, and read the episodes with the highest reward; perilune environments audit RECIPE",
            )
        return  # the pass rate is a stand-in for a missing gold score


def find_reward_error(run: Evidence) -> Iterator[Finding]:
    """Find a verifier that fails, returns one value for all answers, or changed although answers did not."""
    metrics = run.metrics
    failures, groups = metrics.column("failures"), metrics.column("groups")
    shares = [
        None if failed is None or not number else failed / (number * run.samples)
        for failed, number in zip(failures, groups, strict=True)
    ]
    remedy = "run the verifier on one episode by hand, and read the log: perilune logs RUN"
    since = metrics.since(flag_at_least(shares, FAILED_SHARE))
    if since is not None:
        yield Finding(
            "reward error", "broken", since, f"{_latest(shares):.0%} of the episodes got no score", remedy
        )
    reward = metrics.column("reward")
    varied = list(accumulate((value not in (None, 0.0) for value in metrics.column("reward_std")), max))
    jumped = find_shifts(reward, sigmas=JUMP_SIGMAS, least=0.1, share=FALL_SHARE, sticky=-1)
    constant = [
        value == 0.0 and before and jump != 0
        for value, before, jump in zip(metrics.column("reward_std"), varied, jumped, strict=True)
    ]
    since = metrics.since(constant)
    if since is not None:
        why = f"every answer gets the reward {_latest(reward):.3g}, and rewards differed before"
        yield Finding("reward error", "broken", since, why, remedy)
        return
    changed = [
        find_shifts(metrics.column("length"), sigmas=JUMP_SIGMAS, least=1.0, sticky=0),
        find_shifts(metrics.column("entropy"), sigmas=JUMP_SIGMAS, least=0.02, sticky=0),
    ]
    explained = [any(signs) for signs in zip(*changed, strict=True)]
    unexplained = _flag_falls(jumped, explained, accompanied=False)
    since = metrics.since(unexplained)
    if since is not None:
        why = f"the reward fell at once to {_latest(reward):.3g}; length and entropy did not change"
        yield Finding("reward error", "broken", since, why, remedy)


def find_stale_data(run: Evidence) -> Iterator[Finding]:
    """Find tokens that are older than the bound, or suddenly older than before."""
    ages, oldest = run.metrics.column("staleness"), run.metrics.column("staleness_max")
    if run.max_staleness is not None:
        since = run.metrics.since([value is not None and value > run.max_staleness for value in oldest])
        bound = f"the bound is {run.max_staleness:g}"
    else:
        usual = median(ages[:BASELINE_STEPS]) or 0.0
        since = run.metrics.since(flag_at_least(ages, 3 * usual + 1))
        bound = f"it was {usual:g}"
    if since is not None:
        yield Finding(
            "stale data",
            "watch",
            since,
            f"tokens are {_latest(ages):.3g} updates old on average,"
            f" {_latest(oldest) or 0:.3g} at most; {bound}",
            "use more rollout processes, a smaller staleness, or shorter answers",
        )


def find_starvation(run: Evidence) -> Iterator[Finding]:
    """Find a learner that waits for episodes, or an engine that has become much slower."""
    times = run.timings
    sampling, ready = times.column("sampling"), times.column("groups_ready")
    total = _step_seconds(times)
    waits = [
        None if spent is None or groups is None or groups >= 1 or not seconds else spent / seconds
        for spent, groups, seconds in zip(sampling, ready, total, strict=True)
    ]
    rates = [rate or None for rate in times.column("tokens_per_second")]
    usual = median(rates[:BASELINE_STEPS])
    slow = [rate is not None and usual is not None and rate < usual / 4 for rate in rates]
    wait = f"the learner waits {_latest(waits) or 0:.0%} of a step"
    slowdown = f"the engine samples {_latest(rates) or 0:,.0f} tokens/s; it was {usual or 0:,.0f}"
    for flags, why in ((flag_at_least(waits, WAIT_SHARE), wait), (slow, slowdown)):
        since = times.since(flags)
        if since is not None:
            remedy = "use more rollout processes, or run fewer other programs on the machine: perilune top"
            yield Finding("starvation", "watch", since, why, remedy)
            return


def find_stall(run: Evidence) -> Iterator[Finding]:
    """Find a process that is gone, a step that takes very long, or steps that have become slow."""
    if run.silent_seconds is not None and run.silent_seconds > HEARTBEAT_TIMEOUT_S:
        yield Finding(
            "no heartbeat",
            "broken",
            None,
            f"the worker has been silent for {_duration(run.silent_seconds)}",
            "it was killed or its machine stopped: perilune explain RUN, then perilune retry RUN",
        )
        return
    total = _step_seconds(run.timings)
    with_evaluation = [
        None if seconds is None else seconds + (more or 0.0)
        for seconds, more in zip(total, run.timings.column("evaluation"), strict=True)
    ]
    usual = median(total)
    longest = max((seconds for seconds in with_evaluation if seconds is not None), default=0.0)
    if usual is None:
        return
    if run.open_seconds is not None and run.open_seconds > max(SLOW_STEP_FACTOR * usual, 2 * longest, 10.0):
        why = f"no step for {_duration(run.open_seconds)}; the median step takes {_duration(usual)}"
        step = run.metrics.steps[-1] + 1 if run.metrics.steps else None
        yield Finding(
            "stall", "broken", step, why, "read the log: perilune logs RUN; or perilune explain RUN"
        )
        return
    since = run.timings.since(
        flag_at_least(total, SLOW_STEP_FACTOR * (median(total[:BASELINE_STEPS]) or math.inf))
    )
    if since is not None:
        why = (
            f"steps take {_duration(_latest(total) or 0.0)}, more than {SLOW_STEP_FACTOR:g} times as long as"
            " at the start"
        )
        yield Finding("stall", "watch", since, why, "look at the load of the machine: perilune top")


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
    best: tuple[float, float, float, float] | None = None
    for i in range(len(truth)):
        recent = [
            [value for value in values[max(0, i + 1 - TREND_WINDOW_STEPS) : i + 1] if value is not None]
            for values in (truth, reward)
        ]
        if min(map(len, recent)) < TREND_WINDOW_STEPS:
            flags.append(False)
            continue
        means = [math.fsum(values) / TREND_WINDOW_STEPS for values in recent]
        errors = [
            math.fsum((value - mean) ** 2 for value in values) / TREND_WINDOW_STEPS**2
            for mean, values in zip(means, recent, strict=True)
        ]
        now = (means[0], errors[0], means[1], errors[1])
        if best is None or now[0] > best[0]:
            best = now
        fall, rise = best[0] - now[0], now[2] - best[2]
        flags.append(
            fall > max(TREND_SIGMAS * math.sqrt(best[1] + now[1]), 0.1 * abs(best[0]))
            and rise > TREND_SIGMAS * math.sqrt(best[3] + now[3])
        )
    return flags


def _is_clearly_above(share: float, number: float, limit: float) -> bool:
    """Return whether the lower Wilson bound (one-sided 90%) of a share is above `limit`."""
    centre = share + Z_90 * Z_90 / (2 * number)
    spread = Z_90 * math.sqrt(share * (1 - share) / number + Z_90 * Z_90 / (4 * number * number))
    return (centre - spread) / (1 + Z_90 * Z_90 / number) > limit


def _step_seconds(timings: Series) -> list[float | None]:
    parts = [timings.column(name) for name in STEP_PARTS]
    return [math.fsum(value or 0.0 for value in row) or None for row in zip(*parts, strict=True)]


def _latest(values: Values) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.0f} min"


Rule = Callable[[Evidence], Iterator[Finding]]
RULES: Sequence[Rule] = (
    find_stall,
    find_logprob_gap,
    find_reward_error,
    find_reward_hack,
    find_stale_data,
    find_truncation,
    find_dead_groups,
    find_starvation,
)
