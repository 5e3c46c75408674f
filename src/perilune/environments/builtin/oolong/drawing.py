"""Draws questions that have one answer."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from perilune.environments.builtin.oolong.questions import Answer, Find, Question, Relation, evaluate
from perilune.environments.builtin.oolong.records import DAYS, LABELS, MONTHS, Record
from perilune.environments.builtin.oolong.settings import Group, OolongSettings

MOST_INVOLVED = 6  # users that a number of lines in a question singles out
DATED_PAIRS = 0.25  # share of questions about pairs that are about a period
_OF_LINES: Sequence[Find] = ("count", "most", "compare")
_RELATIONS: Sequence[Relation] = ("both", "each", "equal", "sum")


def draw_question(
    settings: OolongSettings, records: Sequence[Record], draw: random.Random
) -> tuple[Question, Answer]:
    """A question of a random kind, drawn until it has one answer. Numbers always are one answer."""
    group = draw.choice(settings.kinds)
    while True:
        asked = _GROUPS[group](records, settings.style == "compact", draw)
        answer = evaluate(asked, records)
        if isinstance(answer, int) or (answer and len(answer) <= settings.most_pairs):
            return asked, answer


def _counting(_: Sequence[Record], __: bool, draw: random.Random) -> Question:
    find: Find = draw.choice((*_OF_LINES, "least"))
    return Question(find, *_two_labels(draw))


def _of_user(records: Sequence[Record], _: bool, draw: random.Random) -> Question:
    find: Find = draw.choice((*_OF_LINES, "user"))
    user = 0 if find == "user" else draw.choice(records).user
    return Question(find, *_two_labels(draw), user=user)


def _temporal(_: Sequence[Record], is_compact: bool, draw: random.Random) -> Question:
    find: Find = draw.choice((*_OF_LINES, "month"))
    asked = Question(find, *_two_labels(draw))
    return asked if find == "month" else _within_period(asked, is_compact, draw)


def _of_pairs(records: Sequence[Record], is_compact: bool, draw: random.Random) -> Question:
    """The number of lines in the condition is one that some users have."""
    label, other = _two_labels(draw)
    find: Find = draw.choice(("pairs", "pairs", "pairs_count"))
    asked = Question(find, label, other, relation=draw.choice(_RELATIONS))
    if draw.random() < DATED_PAIRS:
        asked = _within_period(asked, is_compact, draw)
    lines = Counter(
        one.user for one in records if one.label == label and asked.since <= one.date < asked.until
    )
    counts = sorted(lines.values(), reverse=True) or [1]
    if asked.relation == "sum":
        return replace(asked, number=draw.choice(counts) + draw.choice(counts))
    return replace(asked, number=counts[min(draw.randint(1, MOST_INVOLVED), len(counts)) - 1])


def _two_labels(draw: random.Random) -> tuple[int, int]:
    label, other = draw.sample(range(LABELS), 2)
    return label, other


def _within_period(asked: Question, is_compact: bool, draw: random.Random) -> Question:
    """Asked about the lines before a date, from a date on, or in a month. Compact lines have no days."""
    month = draw.randint(2, MONTHS)
    date = 100 * month + (0 if is_compact else draw.randint(1, DAYS))
    match draw.randrange(3):
        case 0:
            return replace(asked, until=date)
        case 1:
            return replace(asked, since=date)
    return replace(asked, since=100 * month, until=100 * (month + 1))


_GROUPS: Mapping[Group, Callable[[Sequence[Record], bool, random.Random], Question]] = {
    "counting": _counting,
    "user": _of_user,
    "temporal": _temporal,
    "pairs": _of_pairs,
}
