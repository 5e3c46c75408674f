"""Text that others wrote, made safe to show on a terminal: what would command it is shown, not obeyed.

A model, a data set or a task may print escape sequences that move the cursor, rewrite what was said before,
set the window's title, fill the clipboard or have the terminal type an answer. None of them reach it.
"""

from __future__ import annotations

import re

# C0 but tab and newline, DEL, C1; the marks that reorder what is read; line ends that only some obey.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_LINE_END = re.compile("\r+\n?")


def printable(text: str) -> str:
    """`text` with each control character in its written form (ESC as "\\x1b"), line ends as newlines.

    A carriage return alone, with which programs redraw a line, begins a new one: nothing is overwritten.
    """
    return _COMMANDS.sub(_written, _LINE_END.sub("\n", text))


def _written(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
