"""What verdicts say of a scorer: each beside what its output is worth, then all of one rule, across tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from perilune.environments.core.protocol import Failure, Outcome, Score
from perilune.verifiers.audit.findings import Example, Finding, Grade
from perilune.verifiers.audit.known import is_plain
from perilune.verifiers.audit.probes import Output, place_in_list
from perilune.verifiers.audit.search import ENOUGH

SMALL = 0.1  # share of the full reward up to which a payment is small
NEARLY = 0.9  # share of it from which one is as good as full, where nothing about the answer was known
_REMARKS: dict[str, tuple[Grade, str]] = {
    "lookalike gold": ("B", "a right answer in characters that look alike is paid"),
    "gold in another script": ("C", "a right answer in the characters of another script is paid"),
    "cut off gold": ("A", "a right answer that was cut off is paid"),
}


@dataclass(frozen=True, slots=True)
class Judged:
    """An output, what it is worth as far as anybody but the scorer can say, and the scorer's verdict."""

    output: Output
    is_right: bool | None
    outcome: Outcome
    full: float

    @property
    def share(self) -> float:
        """Of the full reward; 0 without a verdict."""
        return self.outcome.reward / self.full if isinstance(self.outcome, Score) else 0.0

    @property
    def example(self) -> Example:
        return Example(self.output.case.task, self.output.transcript, verdict(self.outcome))


@dataclass(slots=True)
class Findings:
    """Findings by what they say, each with the tasks it was seen on."""

    worst: dict[tuple[str, str], Finding] = field(default_factory=dict)
    tasks: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def add(self, probe: str, grade: Grade, what: str, example: Example) -> None:
        """Note a finding; of several with one text the best-paid example is kept."""
        key = (probe, what)
        seen = self.tasks.setdefault(key, set())
        seen.add(example.task.task_id)
        held = self.worst.get(key)
        shown = example if held is None else max(held.example, example, key=_paid)
        self.worst[key] = Finding(probe, grade, what, len(seen), shown)

    def sorted(self) -> list[Finding]:
        """The worst first."""
        return sorted(self.worst.values(), key=lambda finding: (finding.grade, finding.tasks), reverse=True)


def look_at_gold(golds: Sequence[Judged], found: Findings) -> None:
    """Right answers must be paid."""
    for one in golds:
        if isinstance(one.outcome, Failure):
            found.add("gold", "F", "a right answer gets no verdict", one.example)
        elif one.outcome.reward <= 0:
            found.add("gold", "F", "a right answer is refused", one.example)


def look_at_each(judged: Iterable[Judged], found: Findings) -> int:
    """Note what is wrong with single verdicts; returns how many rewards only the scorer can explain."""
    unexplained = 0
    for one in judged:
        name, kind = one.output.probe.name, one.output.probe.kind
        if kind == "equivalent":
            if isinstance(one.outcome, Score) and one.share < ENOUGH:
                found.add(name, "B", "a right answer in another form is refused", one.example)
        elif kind == "filled":
            if one.share > 1 + SMALL:
                found.add(name, "C", "a right answer is paid more for words around it", one.example)
        elif isinstance(one.outcome, Failure):
            if one.is_right is not True:
                found.add(name, "C", "a wrong output gets no verdict", one.example)
        elif kind != "listed" and one.outcome.reward > 0:
            if one.is_right is False:
                add_paid_wrong(one, found)
            unexplained += one.is_right is None
    return unexplained


def add_paid_wrong(one: Judged, found: Findings) -> None:
    """Note that a wrong output was paid."""
    probe = one.output.probe
    gold = one.output.case.gold
    full = ENOUGH if probe.knows and not is_plain(gold or "") else NEARLY
    if probe.name in _REMARKS and one.share >= ENOUGH:
        grade, what = _REMARKS[probe.name]
    elif one.share >= full:
        grade, what = ("D" if probe.knows else "F"), "a wrong output is paid in full"
    elif probe.knows:
        grade, what = "B", "an output that is nearly right is paid in part"
    elif one.share > SMALL:
        grade, what = "C", "a wrong output is paid in part"
    else:
        grade, what = "B", "a wrong output is paid a little"
    found.add(probe.name, grade, what, one.example)


def look_across(judged: Sequence[Judged], found: Findings) -> None:
    """Where nobody but the scorer knows: one rule that is paid on most tasks is no way to be right."""
    for same in _grouped(judged, lambda one: one.output.way if one.is_right is None else None):
        probe = same[0].output.probe
        if probe.kind != "perhaps" or len(same) < 2:
            continue
        full = [one for one in same if one.share >= (ENOUGH if probe.knows else NEARLY)]
        part = [one for one in same if one.share > SMALL]
        if probe.knows and probe.name in _REMARKS:
            if len(full) == len(same):
                _note(full, *_REMARKS[probe.name], found)
        elif probe.knows:
            if len(full) == len(same) > 2 and not probe.reorders:
                _note(full, "C", "a changed right answer is paid in full on every task", found)
        elif 2 * len(full) >= len(same) and len(full) > 1:
            _note(full, "F", "the same way to answer is paid in full on most tasks", found)
        elif 2 * len(part) >= len(same) and len(part) > 1:
            _note(part, "C", "the same way to answer is paid in part on most tasks", found)


def look_at_lists(judged: Sequence[Judged], found: Findings) -> None:
    """A right answer among wrong ones must not be paid wherever it stands.

    A scorer that takes the first or the last answer in a form, such as the last box, is sound; one that takes
    the first or last word or number of a text guesses.
    """
    listed = [one for one in judged if one.output.probe.kind == "listed" and one.share >= ENOUGH]
    for same in _grouped(listed, lambda one: (one.output.probe.name, one.output.case.task.task_id)):
        probe, case = same[0].output.probe, same[0].output.case
        if len({place_in_list(one.output) for one in same}) > 1:
            _note(same, "D", "a right answer is paid wherever it stands among wrong ones", found)
        elif probe.name == "hedged gold" and is_plain(case.gold or ""):
            _note(same, "C", "a right answer is picked by its place among wrong ones", found)


def _grouped(judged: Iterable[Judged], key: Callable[[Judged], object]) -> Iterable[list[Judged]]:
    groups: dict[object, list[Judged]] = {}
    for one in judged:
        name = key(one)
        if name is not None:
            groups.setdefault(name, []).append(one)
    return groups.values()


def _note(judged: Iterable[Judged], grade: Grade, what: str, found: Findings) -> None:
    for one in judged:
        found.add(one.output.probe.name, grade, what, one.example)


def verdict(outcome: Outcome) -> float | str:
    """The reward, or the reason why there is none."""
    return outcome.reward if isinstance(outcome, Score) else outcome.reason


def _paid(example: Example) -> float:
    return example.verdict if isinstance(example.verdict, float) else -1.0
