"""The audit: have the scorer score outputs of known quality, and grade the results."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from perilune.environments.core.episode_settings import episode_settings
from perilune.environments.core.protocol import Environment, Outcome, Score, Task, Transcript
from perilune.environments.core.registry import make_environment
from perilune.errors import RequestError
from perilune.verifiers.audit.appeals import leaking_patterns
from perilune.verifiers.audit.case import Case, Output, Probe, prompt_of
from perilune.verifiers.audit.consistency import check_consistency
from perilune.verifiers.audit.feedback import check_feedback
from perilune.verifiers.audit.findings import Audit, Example, Finding
from perilune.verifiers.audit.forms import FORMS, Form, shown_forms, stated_form
from perilune.verifiers.audit.judging import (
    Findings,
    Scored,
    add_rewarded_wrong,
    check_across_tasks,
    check_each,
    check_gold,
    check_lists,
    verdict,
)
from perilune.verifiers.audit.known import implied
from perilune.verifiers.audit.markers import halves
from perilune.verifiers.audit.probes import GOLD, PROBES
from perilune.verifiers.audit.search import search
from perilune.verifiers.confinement import ScorerLimits
from perilune.verifiers.scorer import Scorer

SEARCHED_TASKS = 3
FEW_TASKS = 2
POOL_FACTOR = 4  # tasks whose gold answers the audit collects, for each that it probes
LONGEST_IN_POOL = 100  # characters
FORM_TASKS = 4  # tasks used to find the form of an answer
ITEM_SECONDS = 3.0
MOST_A_TASK = 2000  # scorings per task, each output three times, without the search
SEARCH = Probe("search", "unknown", False, lambda case, generator: ())
SEARCH_FROM_GOLD = replace(SEARCH, uses_gold=True)

Opinion = Callable[[Task, Transcript], bool | None]
Progress = Callable[[str], None]


@dataclass
class _Bench:
    """The tasks, the scorer under audit and the second opinion. `scorings` counts scored outputs."""

    cases: Sequence[Case]
    opinion: Opinion
    scorer: Scorer
    seed: int
    scorings: int = 0

    def __post_init__(self) -> None:
        golds = [self._second_opinion(case, case.gold) for case in self.cases if case.gold is not None]
        self._has_no_opinion = not any(golds)  # a second opinion that rejects all gold answers is useless

    def score(self, case: Case, transcripts: Sequence[Transcript]) -> list[Outcome]:
        """Score outputs for one task."""
        return self.score_all([(case, one) for one in transcripts])

    def score_all(self, items: Sequence[tuple[Case, Transcript]]) -> list[Outcome]:
        self.scorings += len(items)
        return self.scorer.score([(case.task, transcript) for case, transcript in items])

    def is_right(self, case: Case, answer: str) -> bool | None:
        """Whether an answer is right, by the second opinion, else as far as the gold answer implies it."""
        return implied(case.gold, answer) if self._has_no_opinion else self._second_opinion(case, answer)

    def is_output_right(self, output: Output) -> bool | None:
        """Return whether an output of a probe is right; None if unknown."""
        match output.probe.kind:
            case "right" | "equivalent" | "filled":
                return True
            case "wrong":
                return False
        right = self.is_right(output.case, output.answer)
        is_of_closed_set = output.probe.kind == "enumerated" and output.case.gold in output.case.pool
        return False if right is None and is_of_closed_set else right

    def _second_opinion(self, case: Case, answer: str) -> bool | None:
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

    Scores at most `MOST_A_TASK` outputs per task, plus those of the search.

    Args:
        tasks: number of tasks to probe.
        search_budget: outputs to try on each of three tasks in search of a rewarded wrong one; 0 for no
            search.
        seed: determines tasks, probes and search.
        on_progress: called with a description of the current step.

    Raises:
        RequestError: if the section is wrong, or the environment has no tasks.
        WorkFailedError: if the scorer's process cannot start.
    """
    environment = make_environment(section)
    cases = _cases(environment, tasks, seed)
    opinion: Opinion = getattr(environment, "is_right", lambda task, transcript: None)
    with Scorer(section, _limits(environment, section), rescores=False) as scorer:
        bench = _Bench(cases, opinion, scorer, seed)
        golds = _score_golds(bench)
        on_progress(f"{len(PROBES)} probes on {len(cases)} tasks")
        scored = _score_probes(bench, {one.output.case.task.task_id: one.full for one in golds})
        findings = Findings()
        check_gold(golds, findings)
        unjudged = check_each(scored, findings)
        check_across_tasks(scored, findings)
        check_lists(scored, findings)
        on_progress("the same outputs again, in another order")
        check_consistency([*golds, *scored], bench.score_all, seed, findings)
        check_feedback(environment, golds, bench.score_all, findings)
        searched = 0
        if search_budget:
            on_progress("searching for a rewarded wrong output")
            searched = _search(golds, bench, findings, search_budget)
        shrunk = [_shrunk(finding, bench) for finding in findings.sorted()]
    return Audit(
        environment=dict(section),
        seed=seed,
        tasks=len(cases),
        judged=bench.scorings,
        unjudged=unjudged,
        searched=searched,
        without_gold=sum(case.gold is None for case in cases),
        form=bench.cases[0].form.wrap("…"),
        findings=shrunk,
    )


def replay(audit: Audit) -> Iterator[tuple[Finding, float | str]]:
    """Score the example of each finding again. Yields the finding with its new reward or failure reason.

    Raises:
        RequestError: if the audit's environment cannot be built.
        WorkFailedError: if the scorer's process cannot start.
    """
    limits = _limits(make_environment(audit.environment, checked=False), audit.environment)
    with Scorer(audit.environment, limits, rescores=False) as scorer:
        for finding in audit.findings:
            (outcome,) = scorer.score([(finding.example.task, finding.example.transcript)])
            yield finding, verdict(outcome)


def _limits(environment: Environment, section: Mapping[str, Any]) -> ScorerLimits:
    """Less time than in training for a scorer that computes; as much for one that waits for others."""
    waits = not getattr(environment, "confined", True)
    return ScorerLimits(item_seconds=episode_settings(section).seconds if waits else ITEM_SECONDS)


def _cases(environment: Environment, count: int, seed: int) -> list[Case]:
    drawn = list(itertools.islice(environment.tasks("train", seed), POOL_FACTOR * count))
    tasks = drawn[:count]
    if not tasks:
        raise RequestError("the environment has no tasks to audit", where=environment.id)
    gold_of: Callable[[Task], Transcript | None] = getattr(environment, "gold", lambda task: None)
    golds = [gold_of(task) for task in drawn]
    asked: tuple[str, str] | None = getattr(environment, "form", None)  # of the prompting section
    form = Form(*asked, True) if asked else stated_form([gold.text for gold in golds if gold is not None])
    texts = [None if gold is None else form.unwrap(gold.text) for gold in golds]
    leaks = leaking_patterns([*map(prompt_of, drawn)], texts)
    cases = []
    frequency = Counter(text for text in texts if text is not None and len(text) <= LONGEST_IN_POOL)
    for task, gold, text in zip(tasks, golds, texts, strict=False):
        others = dict.fromkeys(other for other in texts[:count] if other is not None and other != text)
        pool = tuple(answer for answer, _ in (frequency - Counter([text or ""])).most_common())
        cases.append(Case(task, text, tuple(others), gold or Transcript(""), form, pool, leaks))
    return cases


def _score_golds(bench: _Bench) -> list[Scored]:
    """Score the gold answers in the form with the highest reward, and set that form in `bench.cases`."""
    known = [case for case in bench.cases if case.gold is not None]
    golds = _score_gold(known, bench)
    if not _are_rewarded(golds) and known and known[0].form.is_bare:
        some = known[:FORM_TASKS]
        forms = [*shown_forms(some[0].prompt), *FORMS]
        rewards = [
            _mean_reward(_score_gold([replace(case, form=form) for case in some], bench)) for form in forms
        ]
        best = max(rewards)
        if best > 0:
            form = forms[rewards.index(best)]
            bench.cases = [replace(case, form=form) for case in bench.cases]
            golds = _score_gold([case for case in bench.cases if case.gold is not None], bench)
    return golds


def _score_gold(cases: Sequence[Case], bench: _Bench) -> list[Scored]:
    outputs = []
    for case in cases:
        gold = case.gold or ""
        outputs.append(Output(case, GOLD, ("gold", 0, True), gold, case.transcript(case.form.wrap(gold))))
    outcomes = bench.score_all([(one.case, one.transcript) for one in outputs])
    return [
        Scored(output, True, outcome, (outcome.reward if isinstance(outcome, Score) else 0.0) or 1.0)
        for output, outcome in zip(outputs, outcomes, strict=True)
    ]


def _are_rewarded(golds: Sequence[Scored]) -> bool:
    return 2 * sum(isinstance(one.outcome, Score) and one.outcome.reward > 0 for one in golds) >= len(golds)


def _mean_reward(golds: Sequence[Scored]) -> float:
    return sum(one.outcome.reward for one in golds if isinstance(one.outcome, Score)) / len(golds)


def _score_probes(bench: _Bench, full: Mapping[str, float]) -> list[Scored]:
    """Score all probes on all cases."""
    outputs = [
        output
        for index, case in enumerate(bench.cases)
        for probe in PROBES
        if index < FEW_TASKS or not probe.is_slow
        for output in probe.outputs(case, random.Random(f"{bench.seed}/{index}/{probe.name}"))
    ]
    outcomes = bench.score_all([(one.case, one.transcript) for one in outputs])
    return [
        Scored(output, bench.is_output_right(output), outcome, full.get(output.case.task.task_id, 1.0))
        for output, outcome in zip(outputs, outcomes, strict=True)
    ]


def _search(golds: Sequence[Scored], bench: _Bench, findings: Findings, budget: int) -> int:
    """Search on a few tasks whose wrong answers can be recognized. Returns the number of outputs tried."""
    full = {one.output.case.task.task_id: one.full for one in golds}
    searched = 0
    for index, case in enumerate(bench.cases[:SEARCHED_TASKS]):
        if bench.is_right(case, "") is None:
            continue
        reward = full.get(case.task.task_id, 1.0)

        def score(answers: Sequence[str], case: Case = case) -> list[Outcome]:
            return bench.score(case, [case.transcript(case.form.wrap(answer)) for answer in answers])

        results, tried = search(
            case,
            score,
            partial(bench.is_right, case),
            full=reward,
            budget=budget,
            generator=random.Random(f"{bench.seed}/search/{index}"),
        )
        searched += tried
        for one in results:
            probe = SEARCH_FROM_GOLD if one.uses_gold else SEARCH
            transcript = case.transcript(case.form.wrap(one.text))
            output = Output(case, probe, ("search", 0, True), one.text, transcript)
            add_rewarded_wrong(Scored(output, False, Score(one.reward), reward), findings)
    return searched


def _shrunk(finding: Finding, bench: _Bench) -> Finding:
    """For a finding about a chunk of markers: the smallest part of the chunk with the same reward."""
    example = finding.example
    if finding.probe != "markers" or not isinstance(example.verdict, float):
        return finding
    case = next(case for case in bench.cases if case.task == example.task)
    text = example.transcript.text
    while parts := halves(text):
        outcomes = bench.score(case, [case.transcript(part) for part in parts])
        rewarded = [
            part
            for part, outcome in zip(parts, outcomes, strict=True)
            if isinstance(outcome, Score) and outcome.reward >= example.verdict
        ]
        if not rewarded:
            break
        text = rewarded[0]
    return replace(finding, example=Example(example.task, case.transcript(text), example.verdict))
