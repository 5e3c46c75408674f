"""Texts that a small voice learns to say: digits, numbers up to 999, and sentences from a small grammar."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from random import Random
from typing import get_args

from perilune.environments.core.protocol import Split
from perilune.environments.core.splits import select_unique
from perilune.errors import RequestError
from perilune.tasks.speech.stages import Kind

_DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_TEENS = [
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_WHO = ("the old man", "my brother", "the children", "a young woman", "the teacher", "her mother")
_DID = ("found", "wanted", "opened", "painted", "bought", "needed")
_WHAT = (
    "the small house",
    "a red car",
    "the green door",
    "two black horses",
    "a large table",
    "some cold water",
)
_WHERE = ("in the garden", "on the street", "near the river", "after dinner", "last summer", "in the morning")


def draw_texts(kinds: Sequence[Kind], split: Split, count: int, seed: int) -> list[str]:
    """Return `count` different texts of a split, alternating between the kinds.

    Raises:
        RequestError: when a kind has too few texts.
    """
    per_kind = [_draw_kind(kind, split, -(-count // len(kinds)), seed) for kind in kinds]
    return [text for texts in zip(*per_kind, strict=True) for text in texts][:count]


def _draw_kind(kind: Kind, split: Split, count: int, seed: int) -> list[str]:
    texts = [text for _, text in islice(select_unique(split, _draws(kind, seed)), count)]
    if len(texts) < count:
        raise RequestError(
            f"there are only {len(texts)} {split} texts of {kind}", where="kinds", remedy="ask for fewer"
        )
    return texts


def _draws(kind: Kind, seed: int) -> Iterator[tuple[str, str]]:
    random = Random(f"{kind}/{seed}")
    while True:
        text = _DRAW[kind](random)
        yield hashlib.sha256(text.encode()).hexdigest(), text


def words_of(kinds: Sequence[Kind]) -> list[str]:
    return sorted({word for kind in kinds for part in _WORDS[kind] for word in part.split()})


def kind_of(text: str) -> Kind:
    """Return the first kind whose vocabulary has all words of `text`."""
    fitting = (kind for kind in get_args(Kind) if set(text.split()) <= set(words_of([kind])))
    return next(fitting)


def _numbers(random: Random) -> str:
    number = random.randint(10, 999)
    hundreds, below = divmod(number, 100)
    words = [_DIGITS[hundreds], "hundred"] if hundreds else []
    if below >= 20:
        words += [_TENS[below // 10 - 2], *([_DIGITS[below % 10]] if below % 10 else [])]
    elif below:
        words.append([*_DIGITS, *_TEENS][below])
    return " ".join(words)


_DRAW: dict[Kind, Callable[[Random], str]] = {
    "digits": lambda random: " ".join(random.choices(_DIGITS, k=random.randint(2, 5))),
    "numbers": _numbers,
    "sentences": lambda random: " ".join(random.choice(part) for part in (_WHO, _DID, _WHAT, _WHERE)),
}
_WORDS: dict[Kind, Sequence[str]] = {
    "digits": _DIGITS,
    "numbers": [*_DIGITS[1:], *_TEENS, *_TENS, "hundred"],
    "sentences": [*_WHO, *_DID, *_WHAT, *_WHERE],
}
