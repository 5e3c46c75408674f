"""Answers that give away what only their writer was told.

An answer written under a system message is fit to train a model that will not see the message only when it
makes sense without it. Two signs of the contrary are looked for in the text: a phrase that speaks of
instructions, and a run of characters copied from the message that the prompt itself does not have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

PHRASES = (
    "system prompt", "system message", "the hint", "as instructed", "my instructions", "i was told",
    "you told me", "as you asked",
)  # fmt: skip


def leak(text: str, hint: str, prompt: str, *, ngram: int, phrases: Sequence[str] = PHRASES) -> str | None:
    """What in `text` gives `hint` away, or None.

    Case and spaces do not count.

    Args:
        prompt: what the model will be shown; what it shares with the hint is no leak.
        ngram: characters in a row that count as copied.
    """
    body, known, told = (_plain(part) for part in (text, prompt, hint))
    for phrase in phrases:
        if (said := _plain(phrase)) in body and said not in known:
            return f"speaks of its instructions: {phrase!r}"
    for start in range(len(told) - ngram + 1):
        part = told[start : start + ngram]
        if part in body and part not in known:
            return f"copies {part!r} from the system message"
    return None


def _plain(text: str) -> str:
    return re.sub(r"\s+", "", text).casefold()
