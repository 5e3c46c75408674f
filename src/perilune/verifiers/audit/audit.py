"""The audit: it has the scorer score outputs of known quality, and grades the results."""

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
from perilune.verifiers.audit.appeals import find_leaking_patterns
from perilune.verifiers.audit.case import Case, Output, Probe, prompt_text
from perilune.verifiers.audit.consistency import check_consistency
from perilune.verifiers.audit.feedback import check_feedback
from perilune.verifiers.audit.findings import Audit, Example, Finding
from perilune.verifiers.audit.forms import FORMS, Form, find_shown_forms, find_stated_form
from perilune.verifiers.audit.judging import (
    Findings,
    Scored,
    add_rewarded_wrong,
    check_across_tasks,
    check_gold,
    check_lists,
    check_outputs,
    reward_or_reason,
)
from perilune.verifiers.audit.known import judge_by_gold
from perilune.verifiers.audit.markers import split_in_half
from perilune.verifiers.audit.probes import GOLD, PROBES
from perilune.verifiers.audit.search import search_wrong_outputs
from perilune.verifiers.confinement import ScorerLimits
from perilune.verifiers.scorer import Scorer

MAX_SEARCHED_TASKS = 3
SLOW_PROBE_TASKS = 2  # tasks on which slow probes are tried
POOL_FACTOR = 4  # tasks whose gold answers the audit collects, for each probed task
MAX_POOL_ANSWER_CHARS = 100  # longest gold answer in the pool
FORM_SEARCH_TASKS = 4  # tasks used to find the form of an answer
ITEM_TIMEOUT_S = 3.0
SEARCH = Probe("search", "unknown", False, lambda case, generator: ())
SEARCH_FROM_GOLD = replace(SEARCH, uses_gold=True)

Opinion = Callable[[Task, Transcript], bool | None]
Progress = Callable[[str], None]


@dataclass
class _Bench:
    """The tasks, the scorer under audit, and the second opinion.

    Attributes:
        opinion: judges an output independently of the scorer; None if it has no opinion.
        scorings: number of outputs scored so far.
    """

    cases: Sequence[Case]
    opinion: Opinion
    scorer: Scorer
    seed: int
    scorings: int = 0

    def __post_init__(self) -> None:
        golds = [self._second_opinion(case, case.gold) for case in self.cases if case.gold is not None]
        self._has_no_opinion = not any(golds)  # an opinion that accepts no gold answer is not used

    def score(self, case: Case, transcripts: Sequence[Transcript]) -> list[Outcome]:
        """Score outputs for one task."""
        return self.score_all([(case, transcript) for transcript in transcripts])

    def score_all(self, items: Sequence[tuple[Case, Transcript]]) -> list[Outcome]:
        self.scorings += len(items)
        return self.scorer.score([(case.task, transcript) for case, transcript in items])

    def is_right(self, case: Case, answer: str) -> bool | None:
        """Judge an answer by the second opinion, or by the gold answer if there is none; None if unknown."""
        return (
            judge_by_gold(case.gold, answer) if self._has_no_opinion else self._second_opinion(case, answer)
        )

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
    on_progress: Progress = lambda step: None,
) -> Audit:
    """Audit the reward of the environment that a recipe's `section` describes.

    Scores at most 2000 outputs per task, plus those of the search.

    Args:
        search_budget: outputs to try on each of three tasks, to find a wrong output with a reward; 0 for no
            search.
        seed: determines tasks, probes and search.
        on_progress: called with a description of the current step.

    Raises:
        RequestError: if the section is wrong, or the environment has no tasks.
        WorkFailedError: if the scorer's process cannot start.
    """
    environment = make_environment(section)
    cases = _draw_cases(environment, tasks, seed)
    opinion: Opinion = getattr(environment, "is_right", lambda task, transcript: None)
    with Scorer(section, _scorer_limits(environment, section), rescores=False) as scorer:
        bench = _Bench(cases, opinion, scorer, seed)
        golds = _score_golds(bench)
        on_progress(f"{len(PROBES)} probes on {len(cases)} tasks")
        scored = _score_probes(bench, {gold.output.case.task.task_id: gold.full for gold in golds})
        findings = Findings()
        check_gold(golds, findings)
        unjudged = check_outputs(scored, findings)
        check_across_tasks(scored, findings)
        check_lists(scored, findings)
        on_progress("the same outputs again, in another order")
        check_consistency([*golds, *scored], bench.score_all, seed, findings)
        check_feedback(environment, golds, bench.score_all, findings)
        searched = 0
        if search_budget:
            on_progress("searching for a rewarded wrong output")
            searched = _search(golds, bench, findings, search_budget)
        shrunk_findings = [_shrink_markers(finding, bench) for finding in findings.sorted()]
    return Audit(
        environment=dict(section),
        seed=seed,
        tasks=len(cases),
        judged=bench.scorings,
        unjudged=unjudged,
        searched=searched,
        without_gold=sum(case.gold is None for case in cases),
        form=bench.cases[0].form.wrap("…"),
        findings=shrunk_findings,
    )


def replay_examples(audit: Audit) -> Iterator[tuple[Finding, float | str]]:
    """Score the example of each finding again; yield the finding with the new reward or failure reason.

    Raises:
        RequestError: if the audit's environment cannot be built.
        WorkFailedError: if the scorer's process cannot start.
    """
    limits = _scorer_limits(make_environment(audit.environment, checked=False), audit.environment)
    with Scorer(audit.environment, limits, rescores=False) as scorer:
        for finding in audit.findings:
            (outcome,) = scorer.score([(finding.example.task, finding.example.transcript)])
            yield finding, reward_or_reason(outcome)


def _scorer_limits(environment: Environment, section: Mapping[str, Any]) -> ScorerLimits:
    """Return the scorer's limits. A confined scorer, which only computes, gets less time than in training."""
    waits = not getattr(environment, "confined", True)
    return ScorerLimits(item_seconds=episode_settings(section).seconds if waits else ITEM_TIMEOUT_S)


def _draw_cases(environment: Environment, count: int, seed: int) -> list[Case]:
    """Return the first `count` training tasks as cases, with gold answers of `POOL_FACTOR` times as many."""
    drawn = list(itertools.islice(environment.tasks("train", seed), POOL_FACTOR * count))
    tasks = drawn[:count]
    if not tasks:
        raise RequestError(
            "the environment has no tasks to audit",
            where=environment.id,
            remedy="give it training tasks, the tasks that an audit uses",
        )
    gold_of: Callable[[Task], Transcript | None] = getattr(environment, "gold", lambda task: None)
    golds = [gold_of(task) for task in drawn]
    form_parts: tuple[str, str] | None = getattr(environment, "form", None)  # from the prompting section
    form = (
        Form(*form_parts, True)
        if form_parts
        else find_stated_form([gold.text for gold in golds if gold is not None])
    )
    texts = [None if gold is None else form.unwrap(gold.text) for gold in golds]
    leaks = find_leaking_patterns([*map(prompt_text, drawn)], texts)
    cases = []
    frequency = Counter(text for text in texts if text is not None and len(text) <= MAX_POOL_ANSWER_CHARS)
    for task, gold, text in zip(tasks, golds, texts, strict=False):
        others = dict.fromkeys(other for other in texts[:count] if other is not None and other != text)
        pool = tuple(answer for answer, _ in (frequency - Counter([text or ""])).most_common())
        cases.append(Case(task, text, tuple(others), gold or Transcript(""), form, pool, leaks))
    return cases


def _score_golds(bench: _Bench) -> list[Scored]:
    """Score the gold answers. If most get no reward, find the form with the highest, and set it in all cases.

    A form that the environment states is not changed.
    """
    cases = [case for case in bench.cases if case.gold is not None]
    golds = _score_gold(cases, bench)
    if not _are_mostly_rewarded(golds) and cases and cases[0].form.is_bare:
        probed = cases[:FORM_SEARCH_TASKS]
        forms = [*find_shown_forms(probed[0].prompt), *FORMS]
        rewards = [
            _mean_reward(_score_gold([replace(case, form=form) for case in probed], bench)) for form in forms
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
    outcomes = bench.score_all([(output.case, output.transcript) for output in outputs])
    return [
        Scored(output, True, outcome, (outcome.reward if isinstance(outcome, Score) else 0.0) or 1.0)
        for output, outcome in zip(outputs, outcomes, strict=True)
    ]


def _are_mostly_rewarded(golds: Sequence[Scored]) -> bool:
    return 2 * sum(isinstance(g.outcome, Score) and g.outcome.reward > 0 for g in golds) >= len(golds)


def _mean_reward(golds: Sequence[Scored]) -> float:
    return sum(gold.outcome.reward for gold in golds if isinstance(gold.outcome, Score)) / len(golds)


def _score_probes(bench: _Bench, full: Mapping[str, float]) -> list[Scored]:
    outputs = [
        output
        for index, case in enumerate(bench.cases)
        for probe in PROBES
        if index < SLOW_PROBE_TASKS or not probe.is_slow
        for output in probe.outputs(case, random.Random(f"{bench.seed}/{index}/{probe.name}"))
    ]
    outcomes = bench.score_all([(output.case, output.transcript) for output in outputs])
    return [
        Scored(output, bench.is_output_right(output), outcome, full.get(output.case.task.task_id, 1.0))
        for output, outcome in zip(outputs, outcomes, strict=True)
    ]


def _search(golds: Sequence[Scored], bench: _Bench, findings: Findings, budget: int) -> int:
    """Search on a few tasks whose wrong answers can be recognized; return the number of outputs tried."""
    full = {gold.output.case.task.task_id: gold.full for gold in golds}
    searched = 0
    for index, case in enumerate(bench.cases[:MAX_SEARCHED_TASKS]):
        if bench.is_right(case, "") is None:
            continue
        reward = full.get(case.task.task_id, 1.0)

        def score(answers: Sequence[str], case: Case = case) -> list[Outcome]:
            return bench.score(case, [case.transcript(case.form.wrap(answer)) for answer in answers])

        results, tried = search_wrong_outputs(
            case,
            score,
            partial(bench.is_right, case),
            full=reward,
            budget=budget,
            generator=random.Random(f"{bench.seed}/search/{index}"),
        )
        searched += tried
        for wrong in results:
            probe = SEARCH_FROM_GOLD if wrong.uses_gold else SEARCH
            transcript = case.transcript(case.form.wrap(wrong.text))
            output = Output(case, probe, ("search", 0, True), wrong.text, transcript)
            add_rewarded_wrong(Scored(output, False, Score(wrong.reward), reward), findings)
    return searched


def _shrink_markers(finding: Finding, bench: _Bench) -> Finding:
    """Return a finding about markers with its example halved for as long as a half keeps the reward."""
    example = finding.example
    if finding.probe != "markers" or not isinstance(example.verdict, float):
        return finding
    case = next(case for case in bench.cases if case.task == example.task)
    text = example.transcript.text
    while parts := split_in_half(text):
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
