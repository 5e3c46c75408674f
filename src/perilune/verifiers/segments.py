"""Splits an answer into segments, so that each can get its own share of the credit.

Boundaries lie between tokens and never inside a code block or a formula. Only the reasoning is split. The
reasoning ends where the answer begins or where the right answer is first written, because after that a value
would reward copying. The last segment extends from there to the end.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from perilune.frozen import Frozen

_PROTECTED_SPAN = re.compile(
    rb"```.*?(?:```|\Z)|\$\$.*?(?:\$\$|\Z)|\\\[.*?(?:\\\]|\Z)|\\\(.*?(?:\\\)|\Z)|\$[^$\n]+\$"
    rb"|\\begin\{(?P<name>[a-z*]+)\}.*?(?:\\end\{(?P=name)\}|\Z)",
    re.DOTALL,
)


class SegmentSettings(Frozen):
    """Settings of the segments of an answer."""

    cut: Literal["text", "length", "surprise"] = Field(
        "text",
        description="where segments end. text: after separators; length: every `least` tokens; surprise:"
        " before the least likely tokens",
    )
    separators: list[Annotated[str, Field(min_length=1)]] = Field(
        ["\n"], min_length=1, description="texts that end a segment"
    )
    least: int = Field(4, ge=1, description="minimum tokens of a segment")
    most: int = Field(
        24,
        ge=2,
        description="maximum segments of an answer; beyond it, text and length keep evenly spaced ends,"
        " and surprise those before the least likely tokens",
    )


def segment_boundaries(
    pieces: Sequence[bytes], logprobs: NDArray[np.float32], stop: int, settings: SegmentSettings
) -> list[int]:
    """Return boundaries in the reasoning: increasing token counts in (0, `stop`], without the answer's end.

    Args:
        pieces: [T], the bytes of each token; empty for control tokens.
        logprobs: float32[T], log-probabilities of the sampled tokens.
        stop: number of tokens of reasoning (`end_of_reasoning`); also a boundary, unless it is 0 or T.
    """
    ends = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces], dtype=np.int64)])
    text = b"".join(pieces)
    candidates = _find_candidates(text, ends, logprobs, stop, settings)
    protected = _find_protected_spans(text)
    outside = [cut for cut in candidates if not any(start < ends[cut] < end for start, end in protected)]
    last = [stop] if 0 < stop < len(pieces) else []
    spaced = _keep_apart(outside, stop, settings.least)
    return sorted(_thin_out(spaced, settings.most - 1 - len(last), settings.cut)) + last


def end_of_reasoning(pieces: Sequence[bytes], opens: Sequence[str], forms: Sequence[str]) -> int:
    """Return the number of tokens before the answer or the first mention of the right answer; else T.

    Args:
        pieces: [T], the bytes of each token.
        opens: texts with which an answer begins.
        forms: spellings of the right answer. They count only as separate words.
    """
    text = b"".join(pieces)
    starts = [start for start in (text.find(mark.encode()) for mark in opens) if start >= 0]
    for form in forms:
        pattern = rb"(?<![\w.])" + re.escape(form.strip().encode()) + rb"(?!\w|\.\w)"
        if form.strip() and (match := re.search(pattern, text)):
            starts.append(match.start())
    if not starts:
        return len(pieces)
    first = min(starts)
    first = next((start for start, end in _find_protected_spans(text) if start < first < end), first)
    ends = np.cumsum([len(piece) for piece in pieces])
    return int(np.searchsorted(ends, first, side="right"))


def spread_over_tokens(
    ends: Sequence[int], values: Sequence[float] | NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return float64[T], the value of each token's segment.

    Args:
        ends: the number of tokens up to the end of each segment; the last is T.
        values: one value for each segment.
    """
    lengths = [after - before for before, after in pairwise([0, *ends])]
    return np.repeat(np.asarray(values, dtype=np.float64), lengths)


def _find_protected_spans(text: bytes) -> list[tuple[int, int]]:
    """Return the code blocks and formulas, in which no boundary may lie."""
    return [match.span() for match in _PROTECTED_SPAN.finditer(text)]


def _find_candidates(
    text: bytes, ends: NDArray[np.int64], logprobs: NDArray[np.float32], stop: int, settings: SegmentSettings
) -> list[int]:
    """Return the candidate boundaries: the least likely tokens first with `surprise`, else in order."""
    if settings.cut == "length":
        return list(range(settings.least, stop, settings.least))
    if settings.cut == "surprise":
        return [int(token) + 1 for token in np.argsort(logprobs[1:stop], kind="stable")]
    offsets = {offset for separator in settings.separators for offset in _find_ends(separator.encode(), text)}
    return sorted({int(np.searchsorted(ends, offset)) for offset in offsets})


def _find_ends(separator: bytes, text: bytes) -> Iterator[int]:
    start = text.find(separator)
    while start >= 0:
        yield start + len(separator)
        start = text.find(separator, start + len(separator))


def _keep_apart(candidates: Sequence[int], stop: int, distance: int) -> list[int]:
    """Return the candidates at least `distance` tokens from both ends and from each accepted candidate."""
    cuts: list[int] = []
    for cut in candidates:
        if cut < stop and all(abs(cut - other) >= distance for other in (0, stop, *cuts)):
            cuts.append(cut)
    return cuts


def _thin_out(cuts: Sequence[int], max_count: int, cut: str) -> list[int]:
    """Return at most `max_count` boundaries: the first ones with `surprise`, else evenly spaced ones."""
    if len(cuts) <= max_count or cut == "surprise":
        return list(cuts[:max_count])
    return [cuts[index] for index in np.linspace(-1, len(cuts), max_count + 2)[1:-1].round().astype(int)]
