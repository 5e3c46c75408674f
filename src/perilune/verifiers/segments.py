"""Splits an answer into segments, so that each can get its own share of the credit.

Boundaries lie between tokens and never inside a code block or a formula. Only the reasoning is split. It ends
where the answer begins or where the right answer is first written, because from there on a value would reward
copying. The last segment extends from there to the end.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from perilune.frozen import Frozen

_PROTECTED = re.compile(
    rb"```.*?(?:```|\Z)|\$\$.*?(?:\$\$|\Z)|\\\[.*?(?:\\\]|\Z)|\\\(.*?(?:\\\)|\Z)|\$[^$\n]+\$"
    rb"|\\begin\{(?P<name>[a-z*]+)\}.*?(?:\\end\{(?P=name)\}|\Z)",
    re.DOTALL,
)


class SegmentSettings(Frozen):
    """How answers are split into segments."""

    cut: Literal["text", "length", "surprise"] = Field(
        "text",
        description="text: after separators; length: every `least` tokens; surprise: before unlikely tokens",
    )
    separators: list[str] = Field(["\n"], min_length=1, description="texts that end a segment")
    least: int = Field(4, ge=1, description="minimum tokens of a segment; with cut: length, the exact number")
    most: int = Field(24, ge=2, description="maximum segments of an answer")


def segment_boundaries(
    pieces: Sequence[bytes], logprobs: NDArray[np.float32], stop: int, settings: SegmentSettings
) -> list[int]:
    """Boundaries in the reasoning: increasing token counts, 0 < boundary <= `stop`, without the end of the
    answer.

    Args:
        pieces: [T], the bytes of each token; empty for control tokens.
        logprobs: float32[T], log-probabilities of the sampled tokens.
        stop: tokens of reasoning, from `end_of_reasoning`. It is itself a boundary unless it is 0 or T.
    """
    ends = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces], dtype=np.int64)])
    text = b"".join(pieces)
    wanted = _wanted(text, ends, logprobs, stop, settings)
    closed = _closed(text)
    free = [cut for cut in wanted if not any(start < ends[cut] < end for start, end in closed)]
    last = [stop] if 0 < stop < len(pieces) else []
    apart = _apart(free, stop, settings.least)
    return sorted(_thinned(apart, settings.most - 1 - len(last), settings.cut)) + last


def end_of_reasoning(pieces: Sequence[bytes], opens: Sequence[str], forms: Sequence[str]) -> int:
    """Return the number of tokens before the answer begins or the right answer is first written; T if neither
    happens.

    Args:
        pieces: [T], the bytes of each token.
        opens: texts with which an answer begins.
        forms: spellings of the right answer. They count only as separate words.
    """
    text = b"".join(pieces)
    first = [at for at in (text.find(mark.encode()) for mark in opens) if at >= 0]
    for form in forms:
        alone = rb"(?<![\w.])" + re.escape(form.strip().encode()) + rb"(?!\w|\.\w)"
        if form.strip() and (match := re.search(alone, text)):
            first.append(match.start())
    if not first:
        return len(pieces)
    at = min(first)
    at = next((start for start, end in _closed(text) if start < at < end), at)
    ends = np.cumsum([len(piece) for piece in pieces])
    return int(np.searchsorted(ends, at, side="right"))


def spread_over_tokens(
    ends: Sequence[int], values: Sequence[float] | NDArray[np.float64]
) -> NDArray[np.float64]:
    """float64[T]: each token's segment value. `ends` are the segments' ends in tokens; the last is T."""
    lengths = [after - before for before, after in pairwise([0, *ends])]
    return np.repeat(np.asarray(values, dtype=np.float64), lengths)


def _closed(text: bytes) -> list[tuple[int, int]]:
    """Return spans without boundaries inside."""
    return [match.span() for match in _PROTECTED.finditer(text)]


def _wanted(
    text: bytes, ends: NDArray[np.int64], logprobs: NDArray[np.float32], stop: int, settings: SegmentSettings
) -> list[int]:
    """Return candidate boundaries, the best first or in order."""
    if settings.cut == "length":
        return list(range(settings.least, stop, settings.least))
    if settings.cut == "surprise":
        return [int(place) + 1 for place in np.argsort(logprobs[1:stop], kind="stable")]
    found = {at for separator in settings.separators for at in _ends_of(separator.encode(), text)}
    return sorted({int(np.searchsorted(ends, at)) for at in found})


def _ends_of(separator: bytes, text: bytes) -> Iterator[int]:
    at = text.find(separator)
    while at >= 0:
        yield at + len(separator)
        at = text.find(separator, at + len(separator))


def _apart(wanted: Sequence[int], stop: int, least: int) -> list[int]:
    """Return the candidates that keep a distance of `least` from both ends and from earlier candidates."""
    kept: list[int] = []
    for cut in wanted:
        if cut < stop and all(abs(cut - other) >= least for other in (0, stop, *kept)):
            kept.append(cut)
    return kept


def _thinned(places: Sequence[int], room: int, cut: str) -> list[int]:
    """Return at most `room` places: the first ones if they are sorted by quality, else evenly spaced ones."""
    if len(places) <= room or cut == "surprise":
        return list(places[:room])
    return [places[index] for index in np.linspace(-1, len(places), room + 2)[1:-1].round().astype(int)]
