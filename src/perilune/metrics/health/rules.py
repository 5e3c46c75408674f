"""Rules that find problems of a training run, each with the step at which it began."""

import math
from collections.abc import Callable, Iterator, Sequence

from perilune.metrics.health.evidence import SOLVED_PASS_RATE, TRUNCATED_SHARE, Evidence, Finding
from perilune.metrics.health.learning import (
    find_chosen_collapse,
    find_diverging_loss,
    find_entropy_collapse,
    find_undefined_loss,
)
from perilune.metrics.health.reward import (
    find_collapse,
    find_over_optimization,
    find_reward_error,
    find_reward_hack,
)
from perilune.metrics.health.series import BASELINE_STEPS, Series, flag_at_least, latest, median
from perilune.metrics.training import STEP_PARTS

DEAD_GROUP_SHARE = 0.5  # share of dead groups
WAIT_SHARE = 0.8  # share of a step that the learner waits for episodes
HEARTBEAT_TIMEOUT_S = 8.0  # seconds; a worker counts every second
SLOW_STEP_FACTOR = 6.0  # times the median step
Z_90 = 1.2816  # one-sided 90% of a normal distribution


def find_dead_groups(run: Evidence) -> Iterator[Finding]:
    """Find a run in which most groups have equal rewards, and not because their tasks are solved."""
    dead, groups = run.metrics.column("dead_groups"), run.metrics.column("groups")
    passed = run.metrics.column("pass_rate")
    flags = []
    for index, value in enumerate(dead):
        number = sum(count or 1.0 for count in groups[max(0, index - 1) : index + 1])
        is_solved = (passed[index] or 0.0) >= SOLVED_PASS_RATE
        flags.append(
            value is not None and not is_solved and _is_clearly_above(value, number, DEAD_GROUP_SHARE)
        )
    since = run.metrics.since(flags)
    if since is not None:
        rate = latest(passed) or 0.0
        cause, remedy = "almost no answer is right", "use easier tasks, a curriculum, or more SFT"
        if rate >= 0.2:
            cause = f"{rate:.0%} of the answers are right, but most tasks get equal answers"
            remedy = "try a higher temperature, a lower lr, or an entropy bonus"
        yield Finding(
            "dead groups",
            "watch",
            since,
            f"{latest(dead):.0%} of the groups have equal rewards and give no gradient: {cause}",
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
            f"the token limit cuts off {latest(values):.0%} of the answers",
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
            f"tokens are {latest(ages):.3g} updates old on average,"
            f" {latest(oldest) or 0:.3g} at most; {bound}",
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
    wait = f"the learner waits {latest(waits) or 0:.0%} of a step"
    slowdown = f"the engine samples {latest(rates) or 0:,.0f} tokens/s; it was {usual or 0:,.0f}"
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
            f"steps take {_duration(latest(total) or 0.0)}, more than {SLOW_STEP_FACTOR:g} times as long as"
            " at the start"
        )
        yield Finding("stall", "watch", since, why, "look at the load of the machine: perilune top")


def _is_clearly_above(share: float, number: float, limit: float) -> bool:
    """Return whether the lower Wilson bound (one-sided 90%) of a share is above `limit`."""
    centre = share + Z_90 * Z_90 / (2 * number)
    spread = Z_90 * math.sqrt(share * (1 - share) / number + Z_90 * Z_90 / (4 * number * number))
    return (centre - spread) / (1 + Z_90 * Z_90 / number) > limit


def _step_seconds(timings: Series) -> list[float | None]:
    parts = [timings.column(name) for name in STEP_PARTS]
    return [math.fsum(value or 0.0 for value in row) or None for row in zip(*parts, strict=True)]


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.0f} min"


Rule = Callable[[Evidence], Iterator[Finding]]
RULES: Sequence[Rule] = (
    find_stall,
    find_logprob_gap,
    find_undefined_loss,
    find_diverging_loss,
    find_collapse,
    find_reward_error,
    find_reward_hack,
    find_entropy_collapse,
    find_over_optimization,
    find_chosen_collapse,
    find_stale_data,
    find_truncation,
    find_dead_groups,
    find_starvation,
)
