"""Checks that a score depends on task and output alone, not on chance or on earlier scorings."""

import random
from collections.abc import Callable, Sequence

from perilune.environments.core.protocol import Failure, Outcome, Score, Transcript
from perilune.verifiers.audit.case import Case
from perilune.verifiers.audit.judging import Findings, Scored, reward_or_reason

REPEATED_SCORINGS = 32  # scorings of one output in a row
_DESCRIPTIONS = {
    "noise": "the same output gets one score now and another later",
    "state": "the same output gets another score once it has been scored",
    "order": "the score depends on the outputs that were scored before",
}

ScoreAll = Callable[[Sequence[tuple[Case, Transcript]]], list[Outcome]]


def check_consistency(scored: Sequence[Scored], score_all: ScoreAll, seed: int, findings: Findings) -> None:
    """Score all outputs again in another order, twice, and find the cause where a score differs.

    Args:
        score_all: scores items in order. A confined scorer begins each call in a new worker.
    """
    order = [result for result in scored if isinstance(result.outcome, Score)]
    random.Random(seed).shuffle(order)
    again = score_all([_make_item(result) for result in order + order])
    causes: dict[str, str] = {}
    for result, second in zip(order + order, again, strict=True):
        # A failure may be a missed deadline on a busy machine.
        outcome = score_all([_make_item(result)])[0] if isinstance(second, Failure) else second
        if reward_or_reason(outcome) != reward_or_reason(result.outcome):
            task = result.output.case.task.task_id
            causes[task] = causes.get(task) or _find_cause(result, score_all)
            findings.add(causes[task], "F", _DESCRIPTIONS[causes[task]], result.example)


def _find_cause(result: Scored, score_all: ScoreAll) -> str:
    """Return the key of `_DESCRIPTIONS` that explains why an output gets different scores."""
    separate = [reward_or_reason(score_all([_make_item(result)])[0]) for _ in range(3)]
    in_a_row = list(map(reward_or_reason, score_all([_make_item(result)] * REPEATED_SCORINGS)))
    if len({*separate}) > 1 or len({*in_a_row[REPEATED_SCORINGS // 2 :]}) > 1:
        return "noise"
    return "state" if len({*in_a_row}) > 1 else "order"


def _make_item(result: Scored) -> tuple[Case, Transcript]:
    return result.output.case, result.output.transcript
