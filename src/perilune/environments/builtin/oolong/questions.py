"""Questions about records, and the evaluator that answers them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from perilune.environments.builtin.oolong.records import LABEL_COUNT, MONTHS_PER_YEAR, Record

Find = Literal["count", "most", "least", "compare", "user", "month", "pairs", "pairs_count"]
Relation = Literal["both", "each", "equal", "sum"]
Pair = tuple[int, int]
Answer = int | tuple[Pair, ...]
"""A count, label, user, month or sign of a comparison as a number; or pairs of users in order."""

BEFORE_ALL, AFTER_ALL = 0, 100 * (MONTHS_PER_YEAR + 2)  # dates


@dataclass(frozen=True, slots=True)
class Question:
    """A question about the lines of a context.

    Attributes:
        find: "count": how many lines have `label`. "most", "least": the label with most or fewest lines.
            "compare": whether `label` has more lines than `other` (1), fewer (-1) or as many (0). "user",
            "month": the one with most lines of `label`. "pairs", "pairs_count": the pairs of users that
            satisfy `relation`, or how many there are.
        user: only lines of this user count; 0: of all users.
        since, until: only lines from the date `since` on and before the date `until` count.
        relation: "both": both users have at least `number` lines of `label`. "each": one has at least
            `number` lines of `label`, and the other of `other`. "equal": both have the same number of lines
            of `label`, at least `number`. "sum": both have lines of `label`, together `number`.
    """

    find: Find
    label: int = 0
    other: int = 0
    user: int = 0
    since: int = BEFORE_ALL
    until: int = AFTER_ALL
    relation: Relation = "both"
    number: int = 1

    def includes(self, record: Record) -> bool:
        """Return whether a line counts, by its user and date."""
        return self.since <= record.date < self.until and self.user in (0, record.user)


def compute_answer(question: Question, records: Sequence[Record]) -> Answer | None:
    """Return the answer; None if two labels, users or months tie for it."""
    included = [record for record in records if question.includes(record)]
    if question.find in ("pairs", "pairs_count"):
        pairs = _find_related_pairs(question, Counter((record.user, record.label) for record in included))
        return pairs if question.find == "pairs" else len(pairs)
    if question.find in ("user", "month"):
        with_label = [record for record in included if record.label == question.label]
        return _unique_maximum(
            Counter(record.user if question.find == "user" else record.date // 100 for record in with_label)
        )
    tally = Counter(dict.fromkeys(range(LABEL_COUNT), 0))
    tally.update(record.label for record in included)
    match question.find:
        case "most":
            return _unique_maximum(tally)
        case "least":
            return _unique_maximum({label: -count for label, count in tally.items()})
        case "compare":
            more, fewer = tally[question.label], tally[question.other]
            return (more > fewer) - (more < fewer)
    return tally[question.label]


def _find_related_pairs(question: Question, lines: Mapping[Pair, int]) -> tuple[Pair, ...]:
    """Return pairs of users, given the lines of each (user, label)."""

    def is_related(one: int, two: int) -> bool:
        a, b = lines[one, question.label], lines[two, question.label]
        match question.relation:
            case "both":
                return min(a, b) >= question.number
            case "each":
                orders = ((one, two), (two, one))
                return any(
                    min(lines[x, question.label], lines[y, question.other]) >= question.number
                    for x, y in orders
                )
            case "equal":
                return a == b >= question.number
        return min(a, b) > 0 and a + b == question.number

    users = sorted({user for user, label in lines if label in (question.label, question.other)})
    return tuple((first, second) for first, second in combinations(users, 2) if is_related(first, second))


def _unique_maximum(tally: Mapping[int, int]) -> int | None:
    """Return the key with the highest count; None if there is none, or several have it."""
    best = max(tally.values(), default=0)
    maxima = [key for key, count in tally.items() if count == best]
    return maxima[0] if len(maxima) == 1 else None
