"""The audit: let a scorer judge outputs of known worth, and grade what it makes of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from perilune.environments.core.protocol import Environment, Failure, Outcome, Score, Task, Transcript
from perilune.environments.core.registry import make_environment
from perilune.errors import RequestError
from perilune.verifiers.audit.findings import Audit, Example, Finding
from perilune.verifiers.audit.forms import FORMS, Form, shown_forms, stated_form
from perilune.verifiers.audit.judging import (
    Findings,
    Judged,
    add_paid_wrong,
    look_across,
    look_at_each,
    look_at_gold,
    look_at_lists,
    verdict,
)
from perilune.verifiers.audit.known import implied
from perilune.verifiers.audit.markers import halves
from perilune.verifiers.audit.probes import GOLD, PROBES, Case, Output, Probe
from perilune.verifiers.audit.search import search
from perilune.verifiers.confinement import ScorerLimits
from perilune.verifiers.scorer import Scorer

SEARCHED_TASKS = 3
FEW_TASKS = 2
FORM_TASKS = 4  # on which the form of an answer is sought
ITEM_SECONDS = 3.0
MOST_A_TASK = 1800  # verdicts, each output judged three times, without the search
SEARCH = Probe("search", "perhaps", False, lambda case, generator: ())
SEARCH_FROM_GOLD = replace(SEARCH, knows=True)

Opinion = Callable[[Task, Transcript], bool | None]
Progress = Callable[[str], None]


@dataclass
class _Bench:
    """What is audited, and with what; `judged` counts the scorer's verdicts."""

    cases: Sequence[Case]
    opinion: Opinion
    scorer: Scorer
    seed: int
    judged: int = 0

    def __post_init__(self) -> None:
        golds = [self._asked(case, case.gold) for case in self.cases if case.gold is not None]
        self._says_nothing = not any(golds)  # an opinion that does not know the gold answers is none

    def score(self, case: Case, transcripts: Sequence[Transcript]) -> list[Outcome]:
        """The scorer's verdicts on outputs for one task."""
        return self.score_all([(case, one) for one in transcripts])

    def score_all(self, items: Sequence[tuple[Case, Transcript]]) -> list[Outcome]:
        self.judged += len(items)
        return self.scorer.score([(case.task, transcript) for case, transcript in items])

    def is_right(self, case: Case, answer: str) -> bool | None:
        """Whether an answer is right: by the second opinion, else as far as the gold answer tells."""
        return implied(case.gold, answer) if self._says_nothing else self._asked(case, answer)

    def worth(self, output: Output) -> bool | None:
        """Whether an output of a probe is right."""
        match output.probe.kind:
            case "right" | "equivalent" | "filled":
                return True
            case "wrong":
                return False
        return self.is_right(output.case, output.answer)

    def _asked(self, case: Case, answer: str) -> bool | None:
        text = case.form.wrap(answer) if case.form.stated else answer
        return self.opinion(case.task, case.transcript(text))


def audit_reward(
    section: Mapping[str, Any],
    *,
    tasks: int = 8,
    search_budget: int = 480,
    seed: int = 0,
    on_progress: Progress = lambda what: None,
) -> Audit:
    """Audit the reward of the environment that a recipe's `section` describes.

    The scorer judges at most `MOST_A_TASK` outputs a task, and those of the search.

    Args:
        tasks: how many to probe.
        search_budget: outputs to try on each of three tasks in search of a paid wrong one; 0 for no search.
        seed: fixes tasks, probes and search.
        on_progress: told what is being tried.

    Raises:
        RequestError: when the section is wrong, or the environment has no tasks.
        WorkFailedError: when the scorer's process cannot start.
    """
    environment = make_environment(section)
    cases = _cases(environment, tasks, seed)
    opinion: Opinion = getattr(environment, "is_right", lambda task, transcript: None)
    with Scorer(section, ScorerLimits(item_seconds=ITEM_SECONDS)) as scorer:
        bench = _Bench(cases, opinion, scorer, seed)
        golds = _judge_golds(bench)
        on_progress(f"{len(PROBES)} probes on {len(cases)} tasks")
        judged = _judge(bench, {one.output.case.task.task_id: one.full for one in golds})
        found = Findings()
        look_at_gold(golds, found)
        unjudged = look_at_each(judged, found)
        look_across(judged, found)
        look_at_lists(judged, found)
        on_progress("the same outputs again, in another order")
        _repeat([*golds, *judged], bench, found)
        searched = 0
        if search_budget:
            on_progress("searching for a paid wrong output")
            searched = _search(golds, bench, found, search_budget)
        findings = [_shrunk(finding, bench) for finding in found.sorted()]
    return Audit(
        environment=dict(section), seed=seed, tasks=len(cases), judged=bench.judged,
        unjudged=unjudged, searched=searched, without_gold=sum(case.gold is None for case in cases),
        form=bench.cases[0].form.wrap("…"), findings=findings,
    )  # fmt: skip


def replay(audit: Audit) -> Iterator[tuple[Finding, float | str]]:
    """Each finding with what the scorer makes of its example now.

    Raises:
        RequestError: when the audit's environment cannot be built.
        WorkFailedError: when the scorer's process cannot start.
    """
    with Scorer(audit.environment, ScorerLimits(item_seconds=ITEM_SECONDS)) as scorer:
        for finding in audit.findings:
            (outcome,) = scorer.score([(finding.example.task, finding.example.transcript)])
            yield finding, verdict(outcome)


def _cases(environment: Environment, count: int, seed: int) -> list[Case]:
    tasks = list(itertools.islice(environment.tasks("train", seed), count))
    if not tasks:
        raise RequestError("the environment has no tasks to audit", where=environment.id)
    stated: Callable[[Task], Transcript | None] = getattr(environment, "gold", lambda task: None)
    golds = [stated(task) for task in tasks]
    form = stated_form([gold.text for gold in golds if gold is not None])
    texts = [None if gold is None else form.unwrap(gold.text) for gold in golds]
    return [
        Case(
            task,
            text,
            tuple(dict.fromkeys(other for other in texts if other is not None and other != text)),
            gold or Transcript(""),
            form,
        )
        for task, gold, text in zip(tasks, golds, texts, strict=True)
    ]


def _judge_golds(bench: _Bench) -> list[Judged]:
    """The gold answers, in the first form in which most of them are paid; sets that form in `bench.cases`."""
    known = [case for case in bench.cases if case.gold is not None]
    golds = _outcomes(known, bench)
    if not _are_paid(golds) and known and known[0].form.is_bare:
        some = known[:FORM_TASKS]
        forms = [*shown_forms(some[0].prompt), *FORMS]
        rated = [
            (_mean(_outcomes([replace(case, form=form) for case in some], bench)), form) for form in forms
        ]
        best, form = max(rated, key=lambda one: one[0])
        if best > 0:
            _set_form(bench, form)
            golds = _outcomes([case for case in bench.cases if case.gold is not None], bench)
    return golds


def _set_form(bench: _Bench, form: Form) -> None:
    bench.cases = [replace(case, form=form) for case in bench.cases]


def _outcomes(cases: Sequence[Case], bench: _Bench) -> list[Judged]:
    outputs = [
        Output(
            case, GOLD, ("gold", 0, True), case.gold or "", case.transcript(case.form.wrap(case.gold or ""))
        )
        for case in cases
    ]
    outcomes = bench.score_all([(one.case, one.transcript) for one in outputs])
    return [
        Judged(output, True, outcome, (outcome.reward if isinstance(outcome, Score) else 0.0) or 1.0)
        for output, outcome in zip(outputs, outcomes, strict=True)
    ]


def _are_paid(golds: Sequence[Judged]) -> bool:
    return 2 * sum(isinstance(one.outcome, Score) and one.outcome.reward > 0 for one in golds) >= len(golds)


def _mean(golds: Sequence[Judged]) -> float:
    return sum(one.outcome.reward for one in golds if isinstance(one.outcome, Score)) / len(golds)


def _judge(bench: _Bench, full: Mapping[str, float]) -> list[Judged]:
    """All probes on all cases."""
    outputs = [
        output
        for index, case in enumerate(bench.cases)
        for probe in PROBES
        if index < FEW_TASKS or not probe.few
        for output in probe.outputs(case, random.Random(f"{bench.seed}/{index}/{probe.name}"))
    ]
    outcomes = bench.score_all([(one.case, one.transcript) for one in outputs])
    return [
        Judged(output, bench.worth(output), outcome, full.get(output.case.task.task_id, 1.0))
        for output, outcome in zip(outputs, outcomes, strict=True)
    ]


def _repeat(judged: Sequence[Judged], bench: _Bench, found: Findings) -> None:
    """Verdicts must not depend on what was judged before, on the order, or on the time."""
    order = [one for one in judged if isinstance(one.outcome, Score)]
    random.Random(bench.seed).shuffle(order)
    outputs = [(one.output.case, one.output.transcript) for one in order]
    again = bench.score_all(outputs + outputs)  # in one batch, whose process remembers the first half
    for one, second in zip(order + order, again, strict=True):
        first, outcome = one.outcome, second
        if isinstance(outcome, Failure):  # a busy machine may have missed the deadline
            (outcome,) = bench.score(one.output.case, [one.output.transcript])
        if isinstance(outcome, Failure) or not isinstance(first, Score) or outcome.reward != first.reward:
            found.add("again", "F", "the same output gets another verdict the second time", one.example)


def _search(golds: Sequence[Judged], bench: _Bench, found: Findings, budget: int) -> int:
    """Search on a few tasks of which wrong answers are known; returns how many outputs were tried."""
    full = {one.output.case.task.task_id: one.full for one in golds}
    searched = 0
    for index, case in enumerate(bench.cases[:SEARCHED_TASKS]):
        if bench.is_right(case, "") is None:
            continue
        reward = full.get(case.task.task_id, 1.0)

        def judge(answers: Sequence[str], case: Case = case) -> list[Outcome]:
            return bench.score(case, [case.transcript(case.form.wrap(answer)) for answer in answers])

        results, tried = search(
            case,
            judge,
            partial(bench.is_right, case),
            full=reward,
            budget=budget,
            generator=random.Random(f"{bench.seed}/search/{index}"),
        )
        searched += tried
        for one in results:
            probe = SEARCH_FROM_GOLD if one.knows else SEARCH
            transcript = case.transcript(case.form.wrap(one.text))
            output = Output(case, probe, ("search", 0, True), one.text, transcript)
            add_paid_wrong(Judged(output, False, Score(one.reward), reward), found)
    return searched


def _shrunk(finding: Finding, bench: _Bench) -> Finding:
    """A finding about a chunk of markers, with as few of its lines as are still paid as much."""
    example = finding.example
    if finding.probe != "markers" or not isinstance(example.verdict, float):
        return finding
    case = next(case for case in bench.cases if case.task == example.task)
    text = example.transcript.text
    while parts := halves(text):
        outcomes = bench.score(case, [case.transcript(part) for part in parts])
        paid = [
            part
            for part, outcome in zip(parts, outcomes, strict=True)
            if isinstance(outcome, Score) and outcome.reward >= example.verdict
        ]
        if not paid:
            break
        text = paid[0]
    return replace(finding, example=Example(example.task, case.transcript(text), example.verdict))
