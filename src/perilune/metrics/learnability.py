"""A verdict on the evaluation of a checkpoint in an environment: can reinforcement learning start?

Only live groups, whose rewards differ, have a gradient: with a share of 0.2, about three of 16 groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perilune.metrics.bootstrap import Interval

READY_LIVE_SHARE = 0.2  # share of live groups from which RL can start
MIN_LIVE_SHARE = 0.05  # share of live groups below which it cannot
SOLVED_PASS_RATE = 0.9  # pass rate from which there is little left to learn
MIN_FORMAT_SHARE = 0.05  # share of answers in the form below which the form is the problem
MAX_TRUNCATED_SHARE = 0.5  # share of answers cut off from which the token limit is the problem


@dataclass(frozen=True, slots=True)
class Learnability:
    """A verdict on whether a policy can learn from this environment.

    Attributes:
        pass_at_1, pass_at_k: unbiased, with intervals over tasks; `k` is the number of samples per task.
        live: share of groups whose rewards differ; None with one sample per task.
        format: share of answers in the expected form; None if the environment does not report it.
        length: mean number of sampled tokens.
        truncated: share of answers that the token limit cut off.
        verdict: what to do, in words.
    """

    environment: str
    tasks: int
    k: int
    pass_at_1: Interval
    pass_at_k: Interval | None
    live: Interval | None
    format: float | None
    length: float
    truncated: float
    verdict: str


def assess_learnability(summary: Mapping[str, Any]) -> Learnability:
    """Judge the summary of an evaluate stage."""
    passes = {int(name[5:]): Interval(**summary[name]) for name in summary if name.startswith("pass@")}
    live = summary.get("live_groups")
    return Learnability(
        environment=str(summary["environment"]),
        tasks=int(summary["tasks"]),
        k=max(passes),
        pass_at_1=passes[1],
        pass_at_k=passes[max(passes)] if max(passes) > 1 else None,
        live=None if live is None else Interval(**live),
        format=summary.get("format"),
        length=float(summary["length"]["mean"]),
        truncated=float(summary["truncated"]),
        verdict=_verdict(summary, passes[1], None if live is None else Interval(**live)),
    )


def _verdict(summary: Mapping[str, Any], pass_at_1: Interval, live: Interval | None) -> str:
    if pass_at_1.low >= SOLVED_PASS_RATE:
        return "already solved: choose harder tasks"
    if live is None:
        return "unknown: raise samples above 1 to compare answers"
    if live.mean >= READY_LIVE_SHARE:
        return "RL can start"
    answers = sum(n for _, n, _ in summary["correct_per_task"])
    passed = sum(c for _, _, c in summary["correct_per_task"])
    counts = f"{passed} of {answers} answers passed, {live.mean:.0%} of groups are live"
    if pass_at_1.mean > 0.5:
        return f"nearly solved: {counts}; choose harder tasks"
    if live.mean >= MIN_LIVE_SHARE:
        return f"RL can start slowly: {counts}; SFT or easier tasks first are faster"
    return f"SFT first{_likely_cause(summary)}: {counts}"


def _likely_cause(summary: Mapping[str, Any]) -> str:
    """Return the likely cause of failure, besides ability."""
    form = summary.get("format")
    if summary["truncated"] > MAX_TRUNCATED_SHARE:
        return f", or raise max_tokens, which cut off {summary['truncated']:.0%} of answers"
    if form is not None and form < MIN_FORMAT_SHARE:
        return f", or ask for the form of the answer, which {form:.0%} have"
    return ", or easier tasks"
