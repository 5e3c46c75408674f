"""Judges outputs by the gold answer alone.

If the gold answer is one number or one word, every other answer is wrong. If it is an expression, a list or a
sentence, other answers may be right too, so only an equal answer can be judged.
"""

import re

from perilune.environments.adapters.independent_checks import compare_answers

_NUMBER = re.compile(r"[-+]?\d{1,40}(?:,\d{3})*(?:\.\d{1,40})?", re.ASCII)
_WORD = re.compile(r"[^\W_]+")


def is_plain(gold: str) -> bool:
    """Return whether an answer is one number or one word."""
    text = gold.strip()
    return bool(_NUMBER.fullmatch(text) or _WORD.fullmatch(text))


def is_number(gold: str) -> bool:
    return _NUMBER.fullmatch(gold.strip()) is not None


def judge_by_gold(gold: str | None, text: str) -> bool | None:
    """Return whether an output is right; None if the gold answer does not tell."""
    if gold is None:
        return None
    is_equal = compare_answers(text, gold)
    return is_equal if is_equal or is_plain(gold) else None
