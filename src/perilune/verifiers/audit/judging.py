"""Derives findings from scored outputs: from single outputs, and from those of one rule on all tasks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from perilune.environments.core.protocol import Failure, Outcome, Score
from perilune.verifiers.audit.case import Output
from perilune.verifiers.audit.findings import Example, Finding, Grade
from perilune.verifiers.audit.from_gold import position_in_list
from perilune.verifiers.audit.known import is_plain
from perilune.verifiers.audit.search import FULL_SHARE

SMALL_SHARE = 0.1  # share of the full reward up to which a reward is small
FULL_SHARE_WITHOUT_GOLD = 0.9  # share from which a reward without the gold answer counts as full
_PROBE_REMARKS: dict[str, tuple[Grade, str]] = {
    "lookalike gold": ("B", "full reward for a right answer in lookalike characters"),
    "gold in another script": ("C", "full reward for a right answer in another script"),
    "all answers": ("F", "full reward for naming the answers of all other tasks"),
    "all answers in form": ("F", "full reward for naming the answers of all other tasks"),
    "cut off gold": ("A", "full reward for a right answer that was cut off"),
}


@dataclass(frozen=True, slots=True)
class Scored:
    """A scored output.

    Attributes:
        is_right: whether the output is right; None if unknown.
        full: the reward of the task's gold answer.
    """

    output: Output
    is_right: bool | None
    outcome: Outcome
    full: float

    @property
    def share(self) -> float:
        """The reward as a share of the full reward; 0 for a failure."""
        return self.outcome.reward / self.full if isinstance(self.outcome, Score) else 0.0

    @property
    def example(self) -> Example:
        return Example(self.output.case.task, self.output.transcript, reward_or_reason(self.outcome))


@dataclass(slots=True)
class Findings:
    """Findings by probe and text, each with the tasks that show it."""

    worst: dict[tuple[str, str], Finding] = field(default_factory=dict)
    tasks: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def add(self, probe: str, grade: Grade, what: str, example: Example) -> None:
        """Record a finding. Among findings of one probe with the same text, the highest reward is kept."""
        key = (probe, what)
        task_ids = self.tasks.setdefault(key, set())
        task_ids.add(example.task.task_id)
        earlier = self.worst.get(key)
        chosen = example if earlier is None else max(earlier.example, example, key=_reward)
        self.worst[key] = Finding(probe, grade, what, len(task_ids), chosen)

    def sorted(self) -> list[Finding]:
        return sorted(self.worst.values(), key=lambda finding: (finding.grade, finding.tasks), reverse=True)


def check_gold(golds: Sequence[Scored], findings: Findings) -> None:
    """Check that right answers get a reward."""
    for gold in golds:
        if isinstance(gold.outcome, Failure):
            findings.add("gold", "F", "the scorer fails on a right answer", gold.example)
        elif gold.outcome.reward <= 0:
            findings.add("gold", "F", "no reward for a right answer", gold.example)


def check_outputs(scored: Iterable[Scored], findings: Findings) -> int:
    """Check single outputs; return the number of rewarded outputs that may be right or wrong."""
    unjudged = 0
    for result in scored:
        name, kind = result.output.probe.name, result.output.probe.kind
        if kind == "equivalent":
            if isinstance(result.outcome, Score) and result.share < FULL_SHARE:
                findings.add(name, "B", "no reward for a right answer in another form", result.example)
        elif kind == "filled":
            if result.share > 1 + SMALL_SHARE:
                findings.add(name, "C", "extra words around a right answer raise its reward", result.example)
        elif isinstance(result.outcome, Failure):
            if result.is_right is not True:
                findings.add(name, "C", "the scorer fails on a wrong output", result.example)
        elif kind == "copied" and result.share >= FULL_SHARE_WITHOUT_GOLD:
            findings.add(
                name, "F", "the right answer can be copied from every prompt by one rule", result.example
            )
        elif kind != "listed" and result.outcome.reward > 0:
            if result.is_right is False:
                add_rewarded_wrong(result, findings)
            unjudged += result.is_right is None
    return unjudged


def add_rewarded_wrong(result: Scored, findings: Findings) -> None:
    """Record that a wrong output got a reward."""
    probe = result.output.probe
    gold = result.output.case.gold
    full = FULL_SHARE if probe.uses_gold and not is_plain(gold or "") else FULL_SHARE_WITHOUT_GOLD
    if probe.name in _PROBE_REMARKS and result.share >= FULL_SHARE:
        grade, what = _PROBE_REMARKS[probe.name]
    elif result.share >= full:
        grade, what = ("D" if probe.uses_gold else "F"), "full reward for a wrong output"
    elif probe.uses_gold:
        grade, what = "B", "partial reward for a nearly right output"
    elif result.share > SMALL_SHARE:
        grade, what = "C", "partial reward for a wrong output"
    else:
        grade, what = "B", "small reward for a wrong output"
    findings.add(probe.name, grade, what, result.example)


def check_across_tasks(scored: Sequence[Scored], findings: Findings) -> None:
    """Report rules that are rewarded on most tasks, for outputs that cannot be judged alone."""
    for group in _group_by(scored, lambda result: result.output.rule if result.is_right is None else None):
        probe = group[0].output.probe
        if probe.kind not in ("unknown", "enumerated") or len(group) < 2:
            continue
        full = [
            result
            for result in group
            if result.share >= (FULL_SHARE if probe.uses_gold else FULL_SHARE_WITHOUT_GOLD)
        ]
        partial = [result for result in group if result.share > SMALL_SHARE]
        if probe.uses_gold and probe.name in _PROBE_REMARKS:
            if len(full) == len(group):
                _add_all(full, *_PROBE_REMARKS[probe.name], findings)
        elif probe.uses_gold:
            if len(full) == len(group) > 2 and not probe.reorders:
                _add_all(
                    full, "C", "full reward for the same change of the right answer on every task", findings
                )
        elif 2 * len(full) >= len(group) and len(full) > 1:
            _add_all(full, "F", "full reward for answers by one rule on most tasks", findings)
        elif 2 * len(partial) >= len(group) and len(partial) > 1:
            _add_all(partial, "C", "partial reward for answers by one rule on most tasks", findings)


def check_lists(scored: Sequence[Scored], findings: Findings) -> None:
    """Check that a right answer among wrong ones does not get a reward at every position.

    A scorer that takes the first or last answer in a form, such as the last box, is sound. A scorer that
    takes the first or last word or number of a text only guesses.
    """
    listed = [item for item in scored if item.output.probe.kind == "listed" and item.share >= FULL_SHARE]
    for group in _group_by(listed, lambda item: (item.output.probe.name, item.output.case.task.task_id)):
        probe, case = group[0].output.probe, group[0].output.case
        if len({position_in_list(item.output) for item in group}) > 1:
            _add_all(
                group, "D", "full reward for a right answer at several positions among wrong ones", findings
            )
        elif probe.name == "hedged gold" and is_plain(case.gold or ""):
            _add_all(group, "C", "the scorer picks a right answer by its position among wrong ones", findings)


def _group_by(scored: Iterable[Scored], key: Callable[[Scored], object]) -> Iterable[list[Scored]]:
    groups: dict[object, list[Scored]] = {}
    for result in scored:
        name = key(result)
        if name is not None:
            groups.setdefault(name, []).append(result)
    return groups.values()


def _add_all(scored: Iterable[Scored], grade: Grade, what: str, findings: Findings) -> None:
    for result in scored:
        findings.add(result.output.probe.name, grade, what, result.example)


def reward_or_reason(outcome: Outcome) -> float | str:
    return outcome.reward if isinstance(outcome, Score) else outcome.reason


def _reward(example: Example) -> float:
    return example.verdict if isinstance(example.verdict, float) else -1.0
