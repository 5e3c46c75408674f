"""Writes answers, reads them, and scores them as OOLONG does.

An answer is one field, compared as a whole. Only ASCII digits are numbers, without sign, separators or
leading zeros. White space around the field is ignored.
"""

import re
from collections.abc import Sequence
from types import ModuleType

from perilune.environments.builtin.oolong.questions import Answer, Pair, Question

LONGEST = 20_000  # characters of an answer; the longest right one has 1,000 pairs
_COUNT = re.compile(r"0|[1-9][0-9]{0,8}")
_PAIR = re.compile(r"([1-9][0-9]{0,3})-([1-9][0-9]{0,3})")
_BETWEEN = re.compile(r"[ \n]*,[ \n]*|[ \n]+")


def write_answer(asked: Question, answer: Answer, style: ModuleType) -> str:
    """The text of an answer."""
    if not isinstance(answer, int):
        joint: str = style.PAIR_JOINT
        return joint.join(f"{one}-{two}" for one, two in answer)
    match asked.find:
        case "most" | "least":
            return str(style.LABELS[answer])
        case "compare":
            return str(style.SIGNS[answer])
        case "month":
            return str(style.month(answer))
    return str(answer)


def score_field(asked: Question, gold: str, field: str) -> float:
    """The score of an answer, from 0 to 1.

    Counts score 0.75 ** |error| and pairs the F1 of the named pairs, where a repetition is a wrong pair. All
    other answers score 1 if they equal the right one, else 0. Sources: Bertsch et al., OOLONG, arXiv
    2511.02817, and its scorer for counts; Zhang et al., arXiv 2512.24601, for pairs.
    """
    if len(field) > LONGEST:
        return 0.0
    field = field.strip(" \n")
    if asked.find in ("count", "pairs_count"):
        return 0.75 ** abs(int(gold) - int(field)) if _COUNT.fullmatch(field) else 0.0
    if asked.find == "pairs":
        named, right = _pairs(field), _pairs(gold)
        return 2 * len(set(named) & set(right)) / (len(named) + len(right))
    return float(field == gold)


def _pairs(field: str) -> Sequence[Pair]:
    """The pairs in a field with the smaller number first; none if any part is no pair."""
    found = [_PAIR.fullmatch(part) for part in _BETWEEN.split(field)]
    pairs = [(int(one[1]), int(one[2])) for one in found if one is not None]
    return [(min(pair), max(pair)) for pair in pairs] if len(pairs) == len(found) else []
