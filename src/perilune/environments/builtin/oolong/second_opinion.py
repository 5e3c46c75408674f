"""A second opinion: answers a question from the text of lines and question alone, by brute force.

It shares only the vocabulary with the rest: the words of compact lines and the names of labels.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from perilune.environments.builtin.oolong import compact, natural

_OPENINGS: Mapping[str, str] = {
    "abbreviation": r"What does the short form|How is the word|Which initials|What is the acronym"
    r"|What do the letters",
    "description": r"Why|How does|What is the difference|What is the purpose|What is meant",
    "entity": r"What kind|Which tool|What colour|Which material|What animal",
    "human being": r"Who|Whose|Which inventor|Which engineer",
    "location": r"Where|Which city|In which country|On which street",
    "numeric value": r"How many|How much|In which year|How old|What percentage",
}
_NATURAL_LINE = re.compile(r"(2024-\d\d-\d\d) \| user (\d+) \| (.*)")
_COMPACT_LINE = re.compile(r"([a-l])(\d+)([a-z]{2})")
_COMPACT_QUESTION = re.compile(
    r"(?P<find>#?&|[#@%+-])?(?P<label>[A-F])?(?:\?(?P<than>[A-F]))?(?P<how>[=+])?(?P<number>\d+)?(?P<other>[A-F])?"
    r"(?:@(?P<user>\d+))?(?:(?P<sign>[<>=])(?P<date>[a-l]))?"
)
_COMPACT_FINDS = {"#": "count", "+": "most", "-": "least", "@": "user", "%": "month", "&": "pairs"}
_NATURAL_FINDS = {
    "How many pairs": "number of pairs",
    "How many": "count",
    "Which category has the most": "most",
    "Which category has the fewest": "least",
    "Are there more": "compare",
    "Which user": "user",
    "Which month": "month",
    "Which pairs": "pairs",
}
_NATURAL_RELATIONS = {"same number": "equal", "together": "sum", "one user has": "each", "both users": "both"}


@dataclass(frozen=True)
class _Line:
    date: str
    user: str
    label: str


@dataclass(frozen=True)
class _ParsedQuestion:
    find: str
    labels: list[str]
    user: str | None
    period: tuple[str, str] | None  # the sign <, > or =, and a date
    relation: str
    number: int
    all_labels: Sequence[str]
    signs: tuple[str, str, str]  # more, fewer, the same


def is_right(style: str, lines: Iterable[str], question: str, answer: str) -> bool:
    """Return whether an answer without its mark is right."""
    right = answer_by_reading(style, lines, question)
    if isinstance(right, str):
        return answer.strip(" \n") == right
    parts = re.split(r"[ \n]*,[ \n]*|[ \n]+", answer.strip(" \n"))
    if not all(re.fullmatch(r"[1-9][0-9]{0,3}-[1-9][0-9]{0,3}", part) for part in parts):
        return False
    return len(parts) == len(right) and {frozenset(part.split("-")) for part in parts} == right


def answer_by_reading(style: str, lines: Iterable[str], question: str) -> str | set[frozenset[str]]:
    """Return the answer as text, or as a set of pairs of users; "several" if labels, users or months tie."""
    read, parse = (_read_compact, _parse_compact) if style == "compact" else (_read_natural, _parse_natural)
    return _compute_answer([read(line) for line in lines], parse(question.strip()))


def _read_natural(line: str) -> _Line:
    match = _NATURAL_LINE.fullmatch(line.rstrip("\n"))
    assert match, line
    (label,) = [name for name, opening in _OPENINGS.items() if re.match(rf"(?:{opening})\b", match[3])]
    return _Line(match[1], match[2], label)


def _read_compact(line: str) -> _Line:
    match = _COMPACT_LINE.fullmatch(line.rstrip("\n"))
    assert match, line
    (label,) = ["ABCDEF"[index] for index, words in enumerate(compact.WORDS) if match[3] in words]
    return _Line(match[1], match[2], label)


def _parse_natural(question: str) -> _ParsedQuestion:
    text = question.splitlines()[-1].partition("?")[0]
    find = next(find for opening, find in _NATURAL_FINDS.items() if text.startswith(opening))
    period = re.search(r" (in|dated before|dated) (2024[-\d]+)", text)
    user = re.search(r" of user (\d+)", text)
    number = re.search(r"at least (\d+)|(\d+) together", text)
    return _ParsedQuestion(
        find,
        re.findall(r"'([^']+)'", text),
        user[1] if user else None,
        ({"in": "=", "dated before": "<", "dated": ">"}[period[1]], period[2]) if period else None,
        next((relation for words, relation in _NATURAL_RELATIONS.items() if words in text), ""),
        int(number[1] or number[2]) if number else 0,
        natural.LABELS,
        ("more", "fewer", "same"),
    )


def _parse_compact(question: str) -> _ParsedQuestion:
    match = _COMPACT_QUESTION.fullmatch(question)
    assert match, question
    find = "number of pairs" if match["find"] == "#&" else _COMPACT_FINDS.get(match["find"], "compare")
    return _ParsedQuestion(
        find,
        [label for label in (match["label"], match["than"] or match["other"]) if label],
        match["user"],
        (match["sign"], match["date"]) if match["sign"] else None,
        "each" if match["other"] else {None: "both", "=": "equal", "+": "sum"}[match["how"]],
        int(match["number"] or 0),
        "ABCDEF",
        (">", "<", "="),
    )


def _compute_answer(lines: Sequence[_Line], question: _ParsedQuestion) -> str | set[frozenset[str]]:
    rows = [
        row for row in lines if question.user in (None, row.user) and _is_within(row.date, question.period)
    ]

    def count(label: str, user: str | None = None, month: str = "") -> int:
        return sum(
            row.label == label and user in (None, row.user) and row.date.startswith(month) for row in rows
        )

    match question.find:
        case "count":
            return str(count(question.labels[0]))
        case "most" | "least":
            sign = 1 if question.find == "most" else -1
            return _unique_maximum({label: sign * count(label) for label in question.all_labels})
        case "compare":
            more, fewer = map(count, question.labels)
            return question.signs[0 if more > fewer else 1 if more < fewer else 2]
        case "user":
            return _unique_maximum({row.user: count(question.labels[0], user=row.user) for row in rows})
        case "month":
            months = {row.date[:7] for row in rows}
            return _unique_maximum({month: count(question.labels[0], month=month) for month in months})
    counts = {
        user: [count(label, user=user) for label in question.labels] for user in {row.user for row in lines}
    }
    pairs = {
        frozenset((a, b))
        for a, b in combinations(counts, 2)
        if _is_related(question, counts[a], counts[b]) or _is_related(question, counts[b], counts[a])
    }
    return pairs if question.find == "pairs" else str(len(pairs))


def _is_related(question: _ParsedQuestion, one: Sequence[int], two: Sequence[int]) -> bool:
    match question.relation:
        case "both":
            return one[0] >= question.number and two[0] >= question.number
        case "each":
            return one[0] >= question.number and two[1] >= question.number
        case "equal":
            return one[0] == two[0] and one[0] >= question.number
    return one[0] > 0 and two[0] > 0 and one[0] + two[0] == question.number


def _is_within(date: str, period: tuple[str, str] | None) -> bool:
    if period is None:
        return True
    sign, limit = period
    return date.startswith(limit) if sign == "=" else date < limit if sign == "<" else date >= limit


def _unique_maximum(counts: Mapping[str, int]) -> str:
    best = [name for name, count in counts.items() if count == max(counts.values())]
    return best[0] if len(best) == 1 else "several"
