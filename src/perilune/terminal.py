"""Escapes control characters in untrusted text, so that it is safe to print on a terminal.

Text of a model, a data set or a task may contain escape sequences that move the cursor, overwrite earlier
text, set the title of the window, fill the clipboard or make the terminal type. None of them reaches
the terminal.
"""

import re

# C0 except tab and newline, DEL, C1, bidirectional marks, unusual line separators, and lone surrogates, which
# no encoding can write.
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_LINE_END = re.compile("\r+\n?")


def escape_control(text: str) -> str:
    """Escape each control character of `text` (ESC as "\\x1b"), and turn line ends into newlines.

    A lone carriage return, which programs use to redraw a line, becomes a newline, so nothing is overwritten.
    """
    return _CONTROL_CHARACTERS.sub(_escape_character, _LINE_END.sub("\n", text))


def _escape_character(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
