"""The audit: let a scorer judge outputs of known worth, and grade what it makes of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from perilune.environments.protocol import Environment, Failure, Outcome, Score, Task, Transcript
from perilune.environments.registry import make_environment
from perilune.errors import RequestError
from perilune.verifiers.audit.findings import Audit, Example, Finding, Grade
from perilune.verifiers.audit.probes import PROBES, Case, Probe
from perilune.verifiers.audit.search import ENOUGH, search
from perilune.verifiers.confinement import Limits
from perilune.verifiers.scorer import Scorer

SMALL = 0.1  # share of the full reward up to which a payment is small
SEARCHED_TASKS = 3
COSTLY_TASKS = 2
HARMLESS = {"lookalike gold": "in characters that look alike", "cut off gold": "that was cut off"}
ITEM_SECONDS = 3.0

Opinion = Callable[[Task, Transcript], bool | None]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Bench:
    """What is audited, and with what."""

    cases: Sequence[Case]
    opinion: Opinion
    scorer: Scorer
    seed: int

    def worth(self, case: Case, probe: Probe, transcript: Transcript) -> bool | None:
        """Whether an output of a probe is right."""
        if probe.kind in ("right", "equivalent"):
            return True
        return False if probe.kind == "wrong" else self.opinion(case.task, transcript)


@dataclass(frozen=True, slots=True)
class _Judged:
    """One output of a probe, the second opinion of it, and the scorer's."""

    case: Case
    probe: Probe
    transcript: Transcript
    is_right: bool | None
    outcome: Outcome
    full: float

    @property
    def share(self) -> float:
        """Of the full reward; 0 without a verdict."""
        return self.outcome.reward / self.full if isinstance(self.outcome, Score) else 0.0

    @property
    def example(self) -> Example:
        return Example(self.case.task, self.transcript, _verdict(self.outcome))


@dataclass(slots=True)
class _Findings:
    """Findings by what they say, each with the tasks it was seen on."""

    worst: dict[tuple[str, str], Finding] = field(default_factory=dict)
    tasks: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def add(self, probe: str, grade: Grade, what: str, example: Example) -> None:
        key = (probe, what)
        seen = self.tasks.setdefault(key, set())
        seen.add(example.task.task_id)
        held = self.worst.get(key)
        shown = example if held is None else max(held.example, example, key=_paid)
        self.worst[key] = Finding(probe, grade, what, len(seen), shown)

    def sorted(self) -> list[Finding]:
        return sorted(self.worst.values(), key=lambda finding: (finding.grade, finding.tasks), reverse=True)


def audit_reward(
    section: Mapping[str, Any],
    *,
    tasks: int = 8,
    search_budget: int = 480,
    seed: int = 0,
    on_progress: Progress = lambda what: None,
) -> Audit:
    """Audit the reward of the environment that a recipe's `section` describes.

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
    with Scorer(section, Limits(item_seconds=ITEM_SECONDS)) as scorer:
        on_progress(f"{len(PROBES)} probes on {len(cases)} tasks")
        bench = _Bench(cases, opinion, scorer, seed)
        judged = _judge(bench)
        found = _Findings()
        unjudged = 0
        for one in judged:
            unjudged += _look(one, found)
        _look_across(judged, found)
        on_progress("the same outputs again, in another order")
        _repeat(judged, bench, found)
        searched = 0
        if search_budget:
            on_progress("searching for a paid wrong output")
            searched = _search(judged, bench, found, search_budget)
    return Audit(
        environment=dict(section), seed=seed, tasks=len(cases), judged=2 * len(judged) + searched,
        unjudged=unjudged, searched=searched, without_gold=sum(case.gold is None for case in cases),
        findings=found.sorted(),
    )  # fmt: skip


def replay(audit: Audit) -> Iterator[tuple[Finding, float | str]]:
    """Each finding with what the scorer makes of its example now.

    Raises:
        RequestError: when the audit's environment cannot be built.
        WorkFailedError: when the scorer's process cannot start.
    """
    with Scorer(audit.environment, Limits(item_seconds=ITEM_SECONDS)) as scorer:
        for finding in audit.findings:
            (outcome,) = scorer.score([(finding.example.task, finding.example.transcript)])
            yield finding, _verdict(outcome)


def _cases(environment: Environment, count: int, seed: int) -> list[Case]:
    tasks = list(itertools.islice(environment.tasks("train", seed), count))
    if not tasks:
        raise RequestError("the environment has no tasks to audit", where=environment.id)
    stated: Callable[[Task], Transcript | None] = getattr(environment, "gold", lambda task: None)
    golds = [stated(task) for task in tasks]
    texts = [None if gold is None else gold.text for gold in golds]
    return [
        Case(
            task,
            text,
            tuple(dict.fromkeys(other for other in texts if other is not None and other != text)),
            gold or Transcript(""),
        )
        for task, gold, text in zip(tasks, golds, texts, strict=True)
    ]


def _judge(bench: _Bench) -> list[_Judged]:
    """All probes on all cases."""
    written = [
        (case, probe, transcript)
        for index, case in enumerate(bench.cases)
        for probe in PROBES
        if index < COSTLY_TASKS or not probe.costly
        for transcript in probe.transcripts(case, random.Random(f"{bench.seed}/{index}/{probe.name}"))
    ]
    outcomes = bench.scorer.score([(case.task, transcript) for case, _, transcript in written])
    full: dict[str, float] = {}
    for (case, probe, _), outcome in zip(written, outcomes, strict=True):
        if probe.kind == "right" and isinstance(outcome, Score):
            full[case.task.task_id] = outcome.reward
    return [
        _Judged(case, probe, transcript, bench.worth(case, probe, transcript), outcome,
                full.get(case.task.task_id) or 1.0)
        for (case, probe, transcript), outcome in zip(written, outcomes, strict=True)
    ]  # fmt: skip


def _look(one: _Judged, found: _Findings) -> bool:
    """Note what is wrong with one verdict; returns whether only the scorer knows if the output is right."""
    name, outcome = one.probe.name, one.outcome
    if one.probe.kind == "right":
        if isinstance(outcome, Failure):
            found.add(name, "F", "a right answer gets no verdict", one.example)
        elif outcome.reward <= 0:
            found.add(name, "F", "a right answer is refused", one.example)
        return False
    if isinstance(outcome, Failure):
        if one.is_right is not True:
            found.add(name, "C", "a wrong output gets no verdict", one.example)
        return False
    if one.probe.kind == "equivalent":
        if one.share < ENOUGH:
            found.add(name, "B", "a right answer in another form is refused", one.example)
        return False
    if one.is_right is None:
        return outcome.reward > 0
    if not one.is_right and outcome.reward > 0:
        _paid_wrong(name, one.share, one.probe.knows, one.example, found)
    return False


def _paid_wrong(name: str, share: float, knows: bool, example: Example, found: _Findings) -> None:
    if knows and name in HARMLESS:
        how: tuple[Grade, str] = ("B", f"a right answer {HARMLESS[name]} is paid")
    elif share >= ENOUGH:
        how = ("D" if knows else "F", "a wrong output is paid in full")
    elif knows:
        how = ("B", "an output that is nearly right is paid in part")
    elif share > SMALL:
        how = ("C", "a wrong output is paid in part")
    else:
        how = ("B", "a wrong output is paid a little")
    found.add(name, *how, example)


def _look_across(judged: Sequence[_Judged], found: _Findings) -> None:
    """Without a second opinion: one text that is paid in full on half of the tasks or more is no answer."""
    paid: dict[str, list[_Judged]] = {}
    for one in judged:
        if one.is_right is None and not one.probe.knows and one.share >= ENOUGH:
            paid.setdefault(one.transcript.text, []).append(one)
    total = len({one.case.task.task_id for one in judged})
    for same in paid.values():
        tasks = {one.case.task.task_id: one for one in same}
        if len(tasks) >= max(2, total / 2):
            for one in tasks.values():
                found.add(one.probe.name, "F", "the same output is paid in full on most tasks", one.example)


def _repeat(judged: Sequence[_Judged], bench: _Bench, found: _Findings) -> None:
    """Verdicts must not depend on what was judged before, on the order, or on the time."""
    order = [one for one in judged if isinstance(one.outcome, Score)]
    random.Random(bench.seed).shuffle(order)
    again = bench.scorer.score([(one.case.task, one.transcript) for one in order])
    for one, outcome in zip(order, again, strict=True):
        first = one.outcome
        if isinstance(outcome, Failure) or not isinstance(first, Score) or outcome.reward != first.reward:
            found.add("again", "F", "the same output gets another verdict the second time", one.example)


def _search(judged: Sequence[_Judged], bench: _Bench, found: _Findings, budget: int) -> int:
    """Search on a few tasks that have a second opinion; returns how many outputs were tried."""
    full = {one.case.task.task_id: one.full for one in judged}
    searched = 0
    for index, case in enumerate(bench.cases[:SEARCHED_TASKS]):
        task = case.task
        if bench.opinion(task, replace(case.before, text="")) is None:
            continue

        def judge(transcripts: Sequence[Transcript], task: Task = task) -> list[Outcome]:
            return bench.scorer.score([(task, transcript) for transcript in transcripts])

        results, tried = search(
            case,
            judge,
            partial(bench.opinion, task),
            full=full[task.task_id],
            budget=budget,
            generator=random.Random(f"{bench.seed}/search/{index}"),
        )
        searched += tried
        for one in results:
            example = Example(task, replace(case.before, text=one.text), one.reward)
            _paid_wrong("search", one.reward / full[task.task_id], one.knows, example, found)
    return searched


def _verdict(outcome: Outcome) -> float | str:
    """The reward, or the reason why there is none."""
    return outcome.reward if isinstance(outcome, Score) else outcome.reason


def _paid(example: Example) -> float:
    return example.verdict if isinstance(example.verdict, float) else -1.0
