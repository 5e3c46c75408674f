"""`escape_control` shows untrusted text on a terminal without executing its control sequences."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.terminal import escape_control

HOSTILE = {
    "clipboard": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "title": "\x1b]0;owned\x1b\\",
    "answer": "\x1b[6n\x1b[c",
    "clear": "\x1b[2J\x1b[H",
    "eight-bit": "\x9b2J\x9d0;t\x9c",
    "link": "\x1b]8;;https://example.org\x07ok\x1b]8;;\x07",
    "hidden": "password\b\b\b\b\x1b[8msecret\x1b[0m",
    "overwritten": "the test FAILED\rthe test passed",
    "reordered": "user\u202e\u2066 // admin\u2069",
    "bell": "\x07\x00\x7f",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_printable_escapes_terminal_commands(text: str) -> None:
    escaped = escape_control(text)
    assert escaped != text
    assert not [char for char in escaped if unicodedata.category(char) in {"Cc", "Cf"} and char not in "\n\t"]


def test_printable_keeps_text_readable() -> None:
    assert escape_control("\x1b[31mred\x9b") == "\\x1b[31mred\\x9b"
    assert escape_control("one\r\ntwo\rthree\n") == "one\ntwo\nthree\n"
    assert escape_control("a\u202eb") == "a\\u202eb"
    assert escape_control("a\ud800b") == "a\\ud800b"  # which no stream could write


@given(st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs", "Zl", "Zp"])))
def test_printable_keeps_ordinary_text(text: str) -> None:
    assert escape_control(text) == text
