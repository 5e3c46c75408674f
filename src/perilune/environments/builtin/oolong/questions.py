"""Questions about records, and the evaluator that answers them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from perilune.environments.builtin.oolong.records import LABELS, MONTHS, Record

Find = Literal["count", "most", "least", "compare", "user", "month", "pairs", "pairs_count"]
Relation = Literal["both", "each", "equal", "sum"]
Pair = tuple[int, int]
Answer = int | tuple[Pair, ...]
"""A count, label, user, month or sign of a comparison as a number; or pairs of users in order."""

BEFORE_ALL, AFTER_ALL = 0, 100 * (MONTHS + 2)  # dates


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked.

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

    def concerns(self, record: Record) -> bool:
        """Whether a line counts, by its user and date."""
        return self.since <= record.date < self.until and self.user in (0, record.user)


def evaluate(asked: Question, records: Sequence[Record]) -> Answer | None:
    """The answer; None if two labels, users or months tie for it."""
    kept = [one for one in records if asked.concerns(one)]
    if asked.find in ("pairs", "pairs_count"):
        pairs = _related_pairs(asked, Counter((one.user, one.label) for one in kept))
        return pairs if asked.find == "pairs" else len(pairs)
    if asked.find in ("user", "month"):
        of_label = [one for one in kept if one.label == asked.label]
        return _top(Counter(one.user if asked.find == "user" else one.date // 100 for one in of_label))
    tally = Counter(dict.fromkeys(range(LABELS), 0))
    tally.update(one.label for one in kept)
    match asked.find:
        case "most":
            return _top(tally)
        case "least":
            return _top({label: -count for label, count in tally.items()})
        case "compare":
            more, fewer = tally[asked.label], tally[asked.other]
            return (more > fewer) - (more < fewer)
    return tally[asked.label]


def _related_pairs(asked: Question, lines: Mapping[Pair, int]) -> tuple[Pair, ...]:
    """Pairs of users, given the lines of each (user, label)."""

    def related(one: int, two: int) -> bool:
        a, b = lines[one, asked.label], lines[two, asked.label]
        match asked.relation:
            case "both":
                return min(a, b) >= asked.number
            case "each":
                orders = ((one, two), (two, one))
                return any(
                    min(lines[x, asked.label], lines[y, asked.other]) >= asked.number for x, y in orders
                )
            case "equal":
                return a == b >= asked.number
        return min(a, b) > 0 and a + b == asked.number

    users = sorted({user for user, label in lines if label in (asked.label, asked.other)})
    return tuple((one, two) for one, two in combinations(users, 2) if related(one, two))


def _top(tally: Mapping[int, int]) -> int | None:
    """The key with the highest count; None if there is none, or several have it."""
    best = max(tally.values(), default=0)
    at_top = [key for key, count in tally.items() if count == best]
    return at_top[0] if len(at_top) == 1 else None
