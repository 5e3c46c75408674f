"""Writes answers, reads them, and scores them as OOLONG does.

An answer is one field, compared as a whole. Only ASCII digits are numbers, without sign, separators or
leading zeros. White space around the field is ignored.
"""

import re
from collections.abc import Sequence
from types import ModuleType

from perilune.environments.builtin.oolong.questions import Answer, Pair, Question

MAX_ANSWER_CHARS = 20_000  # characters of an answer; the longest right one has 1,000 pairs
_COUNT = re.compile(r"0|[1-9][0-9]{0,8}")
_PAIR = re.compile(r"([1-9][0-9]{0,3})-([1-9][0-9]{0,3})")
_SEPARATOR = re.compile(r"[ \n]*,[ \n]*|[ \n]+")


def write_answer(question: Question, answer: Answer, style: ModuleType) -> str:
    if not isinstance(answer, int):
        separator: str = style.PAIR_SEPARATOR
        return separator.join(f"{first}-{second}" for first, second in answer)
    match question.find:
        case "most" | "least":
            return str(style.LABELS[answer])
        case "compare":
            return str(style.SIGNS[answer])
        case "month":
            return str(style.render_month(answer))
    return str(answer)


def score_field(question: Question, gold: str, field: str) -> float:
    """Return the score of an answer, from 0 to 1.

    Counts score 0.75 ** |error| and pairs the F1 of the named pairs, where a repetition is a wrong pair. All
    other answers score 1 if they equal the right one, else 0. Sources: Bertsch et al., OOLONG, arXiv
    2511.02817, and its scorer for counts; Zhang et al., arXiv 2512.24601, for pairs.
    """
    if len(field) > MAX_ANSWER_CHARS:
        return 0.0
    field = field.strip(" \n")
    if question.find in ("count", "pairs_count"):
        return 0.75 ** abs(int(gold) - int(field)) if _COUNT.fullmatch(field) else 0.0
    if question.find == "pairs":
        named, right = _parse_pairs(field), _parse_pairs(gold)
        return 2 * len(set(named) & set(right)) / (len(named) + len(right))
    return float(field == gold)


def _parse_pairs(field: str) -> Sequence[Pair]:
    """Return the pairs in a field with the smaller number first; none if any part is no pair."""
    matches = [_PAIR.fullmatch(part) for part in _SEPARATOR.split(field)]
    pairs = [(int(match[1]), int(match[2])) for match in matches if match is not None]
    return [(min(pair), max(pair)) for pair in pairs] if len(pairs) == len(matches) else []
