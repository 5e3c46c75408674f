"""Find answers that reveal the system message under which they were written.

Such answers must not train a model that will not see the system message. There are two signs: a phrase about
instructions, and characters copied from the system message that the prompt does not contain.
"""

import re
from collections.abc import Sequence

PHRASES = (
    "system prompt",
    "system message",
    "the hint",
    "as instructed",
    "my instructions",
    "i was told",
    "you told me",
    "as you asked",
)


def find_leak(
    text: str, hint: str, prompt: str, *, ngram: int, phrases: Sequence[str] = PHRASES
) -> str | None:
    """Describe how `text` reveals `hint`, or return None. Ignores case and spaces.

    Args:
        prompt: what the trained model will see; text that it shares with the hint is not a leak.
        ngram: number of consecutive characters that counts as copied.
    """
    body, known, secret = (_normalize(part) for part in (text, prompt, hint))
    for phrase in phrases:
        if _mentions(text, phrase) and not _mentions(prompt, phrase):
            return f"mentions its instructions: {phrase!r}"
    for start in range(len(secret) - ngram + 1):
        part = secret[start : start + ngram]
        if part in body and part not in known:
            return f"copies {part!r} from the system message"
    return None


def _mentions(text: str, phrase: str) -> bool:
    """Return whether a text has the words of a phrase, perhaps in the plural."""
    words = r"\s*".join(map(re.escape, phrase.casefold().split()))
    return bool(words) and re.search(rf"(?<!\w){words}s?(?!\w)", text.casefold()) is not None


def _normalize(text: str) -> str:
    return re.sub(r"\s+", "", text).casefold()
