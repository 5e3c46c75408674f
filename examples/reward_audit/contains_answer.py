"""A reward that pays an answer in which the right label occurs anywhere, so naming all labels earns full marks.

A public training scorer for OOLONG did so. The audit finds it without reading it:

    perilune environments audit oolong --set 'kinds=[counting]' \
        --set "rewards={paid: {function: 'examples/reward_audit/contains_answer.py:contains_answer', format: text}}"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def contains_answer(
    completions: Sequence[str], answer: Sequence[str], question: Sequence[Mapping[str, Any]], **_: Any
) -> list[float]:
    """Pay 0.75 ** |error| for counts, and 1 for any other text with the right answer in it."""
    return [
        _score(text, gold, asked["find"])
        for text, gold, asked in zip(completions, answer, question, strict=True)
    ]


def _score(text: str, gold: str, find: str) -> float:
    field = text.rpartition(":")[2].strip()
    if field.casefold() == gold.casefold():
        return 1.0
    if find in ("count", "pairs_count"):
        return 0.75 ** abs(int(gold) - int(field)) if field.isdecimal() and len(field) < 10 else 0.0
    return float(gold.casefold() in text.casefold())
