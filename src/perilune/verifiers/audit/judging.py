"""Derives findings from scored outputs: from each output alone, and from all outputs of one rule across
tasks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from perilune.environments.core.protocol import Failure, Outcome, Score
from perilune.verifiers.audit.case import Output
from perilune.verifiers.audit.findings import Example, Finding, Grade
from perilune.verifiers.audit.from_gold import place_in_list
from perilune.verifiers.audit.known import is_plain
from perilune.verifiers.audit.search import ENOUGH

SMALL = 0.1  # share of the full reward up to which a reward is small
NEARLY = 0.9  # share from which a reward counts as full, for outputs that were made without the gold answer
_REMARKS: dict[str, tuple[Grade, str]] = {
    "lookalike gold": ("B", "full reward for a right answer in lookalike characters"),
    "gold in another script": ("C", "full reward for a right answer in another script"),
    "all answers": ("F", "full reward for naming the answers of all other tasks"),
    "all answers in form": ("F", "full reward for naming the answers of all other tasks"),
    "cut off gold": ("A", "full reward for a right answer that was cut off"),
}


@dataclass(frozen=True, slots=True)
class Scored:
    """An output, whether it is right (None if unknown), and its outcome.

    Attributes:
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
        return Example(self.output.case.task, self.output.transcript, verdict(self.outcome))


@dataclass(slots=True)
class Findings:
    """Findings by probe and text, each with the tasks that show it."""

    worst: dict[tuple[str, str], Finding] = field(default_factory=dict)
    tasks: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def add(self, probe: str, grade: Grade, what: str, example: Example) -> None:
        """Record a finding. Of several with the same text, the example with the highest reward is kept."""
        key = (probe, what)
        seen = self.tasks.setdefault(key, set())
        seen.add(example.task.task_id)
        earlier = self.worst.get(key)
        shown = example if earlier is None else max(earlier.example, example, key=_reward)
        self.worst[key] = Finding(probe, grade, what, len(seen), shown)

    def sorted(self) -> list[Finding]:
        """Return the worst first."""
        return sorted(self.worst.values(), key=lambda finding: (finding.grade, finding.tasks), reverse=True)


def check_gold(golds: Sequence[Scored], findings: Findings) -> None:
    """Right answers must get a reward."""
    for one in golds:
        if isinstance(one.outcome, Failure):
            findings.add("gold", "F", "the scorer fails on a right answer", one.example)
        elif one.outcome.reward <= 0:
            findings.add("gold", "F", "no reward for a right answer", one.example)


def check_each(scored: Iterable[Scored], findings: Findings) -> int:
    """Check single outputs. Returns the number of rewarded outputs that may be right or wrong."""
    unexplained = 0
    for one in scored:
        name, kind = one.output.probe.name, one.output.probe.kind
        if kind == "equivalent":
            if isinstance(one.outcome, Score) and one.share < ENOUGH:
                findings.add(name, "B", "no reward for a right answer in another form", one.example)
        elif kind == "filled":
            if one.share > 1 + SMALL:
                findings.add(name, "C", "extra words around a right answer raise its reward", one.example)
        elif isinstance(one.outcome, Failure):
            if one.is_right is not True:
                findings.add(name, "C", "the scorer fails on a wrong output", one.example)
        elif kind == "copied" and one.share >= NEARLY:
            findings.add(
                name, "F", "the right answer can be copied from every prompt by one rule", one.example
            )
        elif kind != "listed" and one.outcome.reward > 0:
            if one.is_right is False:
                add_rewarded_wrong(one, findings)
            unexplained += one.is_right is None
    return unexplained


def add_rewarded_wrong(one: Scored, findings: Findings) -> None:
    """Record that a wrong output got a reward."""
    probe = one.output.probe
    gold = one.output.case.gold
    full = ENOUGH if probe.uses_gold and not is_plain(gold or "") else NEARLY
    if probe.name in _REMARKS and one.share >= ENOUGH:
        grade, what = _REMARKS[probe.name]
    elif one.share >= full:
        grade, what = ("D" if probe.uses_gold else "F"), "full reward for a wrong output"
    elif probe.uses_gold:
        grade, what = "B", "partial reward for a nearly right output"
    elif one.share > SMALL:
        grade, what = "C", "partial reward for a wrong output"
    else:
        grade, what = "B", "small reward for a wrong output"
    findings.add(probe.name, grade, what, one.example)


def check_across_tasks(scored: Sequence[Scored], findings: Findings) -> None:
    """If nobody knows whether outputs are right: one rule that is rewarded on most tasks must be wrong."""
    for same in _grouped(scored, lambda one: one.output.rule if one.is_right is None else None):
        probe = same[0].output.probe
        if probe.kind not in ("unknown", "enumerated") or len(same) < 2:
            continue
        full = [one for one in same if one.share >= (ENOUGH if probe.uses_gold else NEARLY)]
        part = [one for one in same if one.share > SMALL]
        if probe.uses_gold and probe.name in _REMARKS:
            if len(full) == len(same):
                _add_all(full, *_REMARKS[probe.name], findings)
        elif probe.uses_gold:
            if len(full) == len(same) > 2 and not probe.reorders:
                _add_all(
                    full, "C", "full reward for the same change of the right answer on every task", findings
                )
        elif 2 * len(full) >= len(same) and len(full) > 1:
            _add_all(full, "F", "full reward for answers by one rule on most tasks", findings)
        elif 2 * len(part) >= len(same) and len(part) > 1:
            _add_all(part, "C", "partial reward for answers by one rule on most tasks", findings)


def check_lists(scored: Sequence[Scored], findings: Findings) -> None:
    """A right answer among wrong ones must not get a reward at every position.

    A scorer that takes the first or last answer in a form, such as the last box, is sound. One that takes the
    first or last word or number of a text guesses.
    """
    listed = [one for one in scored if one.output.probe.kind == "listed" and one.share >= ENOUGH]
    for same in _grouped(listed, lambda one: (one.output.probe.name, one.output.case.task.task_id)):
        probe, case = same[0].output.probe, same[0].output.case
        if len({place_in_list(one.output) for one in same}) > 1:
            _add_all(
                same, "D", "full reward for a right answer at several positions among wrong ones", findings
            )
        elif probe.name == "hedged gold" and is_plain(case.gold or ""):
            _add_all(same, "C", "the scorer picks a right answer by its position among wrong ones", findings)


def _grouped(scored: Iterable[Scored], key: Callable[[Scored], object]) -> Iterable[list[Scored]]:
    groups: dict[object, list[Scored]] = {}
    for one in scored:
        name = key(one)
        if name is not None:
            groups.setdefault(name, []).append(one)
    return groups.values()


def _add_all(scored: Iterable[Scored], grade: Grade, what: str, findings: Findings) -> None:
    for one in scored:
        findings.add(one.output.probe.name, grade, what, one.example)


def verdict(outcome: Outcome) -> float | str:
    """Return the reward, or the reason of the failure."""
    return outcome.reward if isinstance(outcome, Score) else outcome.reason


def _reward(example: Example) -> float:
    return example.verdict if isinstance(example.verdict, float) else -1.0
