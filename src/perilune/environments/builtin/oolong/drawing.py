"""Draws questions that have one answer."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from perilune.environments.builtin.oolong.questions import Answer, Find, Question, Relation, compute_answer
from perilune.environments.builtin.oolong.records import DAYS_PER_MONTH, LABEL_COUNT, MONTHS_PER_YEAR, Record
from perilune.environments.builtin.oolong.settings import Group, OolongSettings

MAX_INVOLVED_USERS = 6  # users that a number of lines in a question singles out
DATED_PAIRS_SHARE = 0.25  # share of questions about pairs that are about a period
_LINE_FINDS: Sequence[Find] = ("count", "most", "compare")
_RELATIONS: Sequence[Relation] = ("both", "each", "equal", "sum")


def draw_question(
    settings: OolongSettings, records: Sequence[Record], draw: random.Random
) -> tuple[Question, Answer]:
    """Draw questions of a random kind until one has a single answer, and return both."""
    group = draw.choice(settings.kinds)
    while True:
        question = _DRAWERS[group](records, settings.style == "compact", draw)
        answer = compute_answer(question, records)
        if isinstance(answer, int) or (answer and len(answer) <= settings.most_pairs):
            return question, answer


def _draw_counting(_: Sequence[Record], __: bool, draw: random.Random) -> Question:
    find: Find = draw.choice((*_LINE_FINDS, "least"))
    return Question(find, *_draw_two_labels(draw))


def _draw_about_user(records: Sequence[Record], _: bool, draw: random.Random) -> Question:
    find: Find = draw.choice((*_LINE_FINDS, "user"))
    user = 0 if find == "user" else draw.choice(records).user
    return Question(find, *_draw_two_labels(draw), user=user)


def _draw_temporal(_: Sequence[Record], is_compact: bool, draw: random.Random) -> Question:
    find: Find = draw.choice((*_LINE_FINDS, "month"))
    question = Question(find, *_draw_two_labels(draw))
    return question if find == "month" else _add_period(question, is_compact, draw)


def _draw_about_pairs(records: Sequence[Record], is_compact: bool, draw: random.Random) -> Question:
    """Draw a question about pairs, whose condition has a number of lines that some users have."""
    label, other = _draw_two_labels(draw)
    find: Find = draw.choice(("pairs", "pairs", "pairs_count"))
    question = Question(find, label, other, relation=draw.choice(_RELATIONS))
    if draw.random() < DATED_PAIRS_SHARE:
        question = _add_period(question, is_compact, draw)
    lines = Counter(
        record.user
        for record in records
        if record.label == label and question.since <= record.date < question.until
    )
    counts = sorted(lines.values(), reverse=True) or [1]
    if question.relation == "sum":
        return replace(question, number=draw.choice(counts) + draw.choice(counts))
    return replace(question, number=counts[min(draw.randint(1, MAX_INVOLVED_USERS), len(counts)) - 1])


def _draw_two_labels(draw: random.Random) -> tuple[int, int]:
    label, other = draw.sample(range(LABEL_COUNT), 2)
    return label, other


def _add_period(question: Question, is_compact: bool, draw: random.Random) -> Question:
    """Limit a question to lines before a date, from a date on, or in a month. Compact lines have no days."""
    month = draw.randint(2, MONTHS_PER_YEAR)
    date = 100 * month + (0 if is_compact else draw.randint(1, DAYS_PER_MONTH))
    match draw.randrange(3):
        case 0:
            return replace(question, until=date)
        case 1:
            return replace(question, since=date)
    return replace(question, since=100 * month, until=100 * (month + 1))


_DRAWERS: Mapping[Group, Callable[[Sequence[Record], bool, random.Random], Question]] = {
    "counting": _draw_counting,
    "user": _draw_about_user,
    "temporal": _draw_temporal,
    "pairs": _draw_about_pairs,
}
