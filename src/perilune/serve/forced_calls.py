"""Reads tool calls that a grammar enforces, and passes on their arguments while they are generated.

The grammar guarantees the texts around names and arguments (`ToolFormat.spelling`), so the reader holds no
arguments back.
"""

from __future__ import annotations

import re
from typing import Literal

from perilune.data.tool_calls import ToolCall
from perilune.serve.tool_formats import NAME, Brackets, Spelling, ToolFormat

CallPart = tuple[Literal["call"], ToolCall] | tuple[Literal["arguments", "end"], str]
"""The name and first arguments of a call; further arguments of the last call; or its end, with no text."""


class ForcedCalls:
    """The calls in the text of one answer, which comes in pieces."""

    def __init__(self, spelling: Spelling) -> None:
        before, between = map(_pattern, (spelling.before, spelling.between))
        # Wait for the first character of the arguments: until then, a line break that belongs to `between`
        # may still arrive.
        self._head = re.compile(rf"{before}({NAME}){between}(?=\S)")
        self._buffer = ""  # the text since the last call, or the arguments of the open one
        self._brackets: Brackets | None = None  # of the open call

    @classmethod
    def of_format(cls, form: ToolFormat | None) -> ForcedCalls | None:
        """Return the reader for a format; None if calls in it cannot be forced."""
        return None if form is None or form.spelling is None else cls(form.spelling)

    def feed(self, text: str) -> list[CallPart]:
        """Return the parts that can be read with more text. A truncated answer leaves its last call open."""
        self._buffer += text
        new = len(self._buffer) - len(text)  # start of the text that was not passed on yet
        parts: list[CallPart] = []
        while True:
            name = None
            if self._brackets is None:
                head = self._head.search(self._buffer)
                if head is None:
                    return parts
                name, new = head[1], 0
                self._buffer, self._brackets = self._buffer[head.end() :], Brackets()
            end = self._brackets.end(self._buffer, 0)
            more = self._buffer[new:end]
            if name is not None:
                parts.append(("call", (name, more)))
            elif more:
                parts.append(("arguments", more))
            if end is None:
                return parts
            parts.append(("end", ""))
            self._buffer, self._brackets = self._buffer[end:], None


def _pattern(text: str) -> str:
    """Return the pattern of a fixed text of a call, with optional line breaks."""
    return re.escape(text).replace("\\\n", "\n?")
