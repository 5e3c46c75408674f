"""Checks that a score depends on task and output alone: not on chance, nor on what was scored before."""

import random
from collections.abc import Callable, Sequence

from perilune.environments.core.protocol import Failure, Outcome, Score, Transcript
from perilune.verifiers.audit.case import Case
from perilune.verifiers.audit.judging import Findings, Scored, verdict

REPEATS = 32  # scorings of one output in a row
_WHAT = {
    "noise": "the same output gets one score now and another later",
    "state": "the same output gets another score once it has been scored",
    "order": "the score depends on the outputs that were scored before",
}

ScoreAll = Callable[[Sequence[tuple[Case, Transcript]]], list[Outcome]]


def check_consistency(scored: Sequence[Scored], score_all: ScoreAll, seed: int, findings: Findings) -> None:
    """Score all outputs again in another order, twice, and find the cause where a score differs.

    Args:
        score_all: scores items in order. The worker of a confined scorer has scored nothing before.
    """
    order = [one for one in scored if isinstance(one.outcome, Score)]
    random.Random(seed).shuffle(order)
    again = score_all([_item(one) for one in order + order])
    causes: dict[str, str] = {}
    for one, second in zip(order + order, again, strict=True):
        # A busy machine may have missed the deadline.
        outcome = score_all([_item(one)])[0] if isinstance(second, Failure) else second
        if verdict(outcome) != verdict(one.outcome):
            task = one.output.case.task.task_id
            causes[task] = causes.get(task) or _cause(one, score_all)
            findings.add(causes[task], "F", _WHAT[causes[task]], one.example)


def _cause(one: Scored, score_all: ScoreAll) -> str:
    alone = [verdict(score_all([_item(one)])[0]) for _ in range(3)]
    in_a_row = list(map(verdict, score_all([_item(one)] * REPEATS)))
    if len({*alone}) > 1 or len({*in_a_row[REPEATS // 2 :]}) > 1:
        return "noise"
    return "state" if len({*in_a_row}) > 1 else "order"


def _item(one: Scored) -> tuple[Case, Transcript]:
    return one.output.case, one.output.transcript
