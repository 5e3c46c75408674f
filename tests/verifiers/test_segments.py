"""Segment boundaries in answers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.verifiers.segments import (
    SegmentSettings,
    end_of_reasoning,
    segment_boundaries,
    spread_over_tokens,
)


def characters(text: str) -> list[bytes]:
    return [character.encode() for character in text]


def cut_at(text: str, stop: int | None = None, logprobs: list[float] | None = None, **options) -> list[int]:
    pieces = characters(text)
    array = np.zeros(len(pieces), np.float32) if logprobs is None else np.array(logprobs, np.float32)
    return segment_boundaries(
        pieces, array, len(pieces) if stop is None else stop, SegmentSettings(**options)
    )


def parts(text: str, places: list[int]) -> list[str]:
    return [text[before:after] for before, after in zip([0, *places], [*places, len(text)], strict=True)]


def test_text_cut_ends_segments_after_separators() -> None:
    text = "one\n\ntwo\n\nthree;9"
    assert parts(text, cut_at(text, separators=["\n\n"], least=1)) == ["one\n\n", "two\n\n", "three;9"]
    columns = "78015,46111,32106;615"
    assert parts(columns, cut_at(columns, stop=17, separators=[",", "/"])) == [
        "78015,", "46111,", "32106", ";615",
    ]  # fmt: skip


def test_token_with_separator_inside_is_not_split() -> None:
    pieces = [b"one", b"\n\nt", b"wo"]
    ends = segment_boundaries(
        pieces, np.zeros(3, np.float32), 3, SegmentSettings(separators=["\n\n"], least=1)
    )
    assert ends == [2]


def test_cut_by_length_and_by_surprise() -> None:
    assert cut_at("0123456789", cut="length", least=3) == [3, 6]  # the rest would be shorter
    logprobs = [-9.0, 0, -1, 0, 0, -3, 0, 0, -2, 0]
    assert cut_at("0123456789", logprobs=logprobs, cut="surprise", least=2, most=3) == [5, 8]


def test_segments_keep_minimum_length_and_maximum_count() -> None:
    assert cut_at("a\nb\nc\nlonger\nend...", separators=["\n"], least=5) == [6, 13]
    many = "x\n" * 50
    assert len(cut_at(many, separators=["\n"], least=1, most=10)) == 9
    spacing = np.diff([0, *cut_at(many, separators=["\n"], least=1, most=10), len(many)])
    assert spacing.max() <= 3 * spacing.min()  # evenly
    assert cut_at(many, stop=80, separators=["\n"], most=2) == [80]


@pytest.mark.parametrize(
    "closed",
    ["```python\na = 1\nb = 2\n```", "$$\na\n=\nb\n$$", "\\[\na\nb\n\\]", "\\(a\nb\\)",
     "\\begin{align}\na\nb\n\\end{align}", "```\nnever\nclosed"],
)  # fmt: skip
def test_code_blocks_and_formulas_are_not_split(closed: str) -> None:
    text = f"first\n{closed}\nlast"
    places = cut_at(text, separators=["\n"], least=1)
    assert any(closed in part for part in parts(text, places))
    for cut in ("length", "surprise"):
        inside = range(len("first\n") + 1, len("first\n") + len(closed))
        assert not set(cut_at(text, cut=cut, least=1, most=99)) & set(inside)


def test_reasoning_ends_before_answer_mark_or_first_correct_answer() -> None:
    def end(text: str, *forms: str) -> str:
        return text[: end_of_reasoning(characters(text), [";"], forms)]

    assert end("78015,46111;615", "615") == "78015,46111"
    assert end("78015,46111", "615") == "78015,46111"  # cut off before an answer
    assert end(";615", "615") == ""
    assert end("I guess 615, so 615 it is;615", "615") == "I guess "
    assert end("it is 46151 or 615.5 or x615;615", "615") == "it is 46151 or 615.5 or x615"
    assert end("about 1,000 of them;1000", "1000", "1,000") == "about "
    assert end("so $a = 615$;615", "615") == "so "  # not in the middle of a formula


def test_token_that_overlaps_answer_belongs_to_answer() -> None:
    assert end_of_reasoning([b"so", b", ;6", b"15"], [";"], []) == 1
    assert end_of_reasoning([b"", b"so", b"", b";6"], [";"], []) == 3


def test_reasoning_end_with_character_of_several_tokens() -> None:
    accented = "é".encode()
    assert end_of_reasoning([accented[:1], accented[1:], b";", b"1"], [";"], ["1"]) == 2


def test_spread_over_tokens_repeats_value_of_segment() -> None:
    np.testing.assert_array_equal(spread_over_tokens([2, 3], [0.5, -1.0]), [0.5, 0.5, -1.0])


@given(
    text=st.text(st.sampled_from("ab\n$`;1"), max_size=40),
    cut=st.sampled_from(["text", "length", "surprise"]),
    least=st.integers(1, 6),
    most=st.integers(2, 8),
    seed=st.integers(0, 99),
)
def test_boundaries_are_sorted_and_keep_minimum_distance(
    text: str, cut: str, least: int, most: int, seed: int
) -> None:
    pieces = characters(text)
    stop = end_of_reasoning(pieces, [";"], ["1"])
    logprobs = np.random.default_rng(seed).normal(size=len(pieces)).astype(np.float32)
    ends = segment_boundaries(pieces, logprobs, stop, SegmentSettings(cut=cut, least=least, most=most))
    assert ends == sorted(set(ends))
    assert all(0 < end <= stop and end < len(pieces) for end in ends)
    assert len(ends) < most
    if 0 < stop < len(pieces):
        assert ends[-1] == stop
    inner = [0, *(end for end in ends if end != stop), stop]
    assert len(inner) == 2 or min(np.diff(inner)) >= least


def test_an_empty_separator_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 character"):
        SegmentSettings(separators=[""])
