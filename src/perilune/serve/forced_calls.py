"""Reads calls that a grammar holds an answer to, and passes their arguments on while they are generated.

The grammar guarantees the texts around names and arguments (`ToolFormat.spelling`), so nothing is held back.
"""

import re
from typing import Literal

from perilune.data.tool_calls import ToolCall
from perilune.serve.tool_formats import NAME, Brackets, Spelling

CallPart = tuple[Literal["call"], ToolCall] | tuple[Literal["arguments", "end"], str]
"""The name and first arguments of a call; further arguments of the last call; or its end, with no text."""


class ForcedCalls:
    """The calls in the text of one answer, which comes in pieces."""

    def __init__(self, spelling: Spelling) -> None:
        before, between = map(_pattern, (spelling.before, spelling.between))
        # A call begins with its arguments: before, a line break at the end of `between` may be still to come.
        self._head = re.compile(rf"{before}({NAME}){between}(?=\S)")
        self._held = ""  # the text since the last call, or the arguments of the open one
        self._brackets: Brackets | None = None  # of the open call

    def feed(self, text: str) -> list[CallPart]:
        """The parts that follow from more text. An answer that is cut off leaves its last call open."""
        self._held += text
        new = len(self._held) - len(text)  # where the arguments begin that were not passed on
        parts: list[CallPart] = []
        while True:
            name = None
            if self._brackets is None:
                head = self._head.search(self._held)
                if head is None:
                    return parts
                name, new = head[1], 0
                self._held, self._brackets = self._held[head.end() :], Brackets()
            end = self._brackets.end(self._held, 0)
            more = self._held[new:end]
            if name is not None:
                parts.append(("call", (name, more)))
            elif more:
                parts.append(("arguments", more))
            if end is None:
                return parts
            parts.append(("end", ""))
            self._held, self._brackets = self._held[end:], None


def _pattern(text: str) -> str:
    """A fixed text of a call, whose line breaks are optional."""
    return re.escape(text).replace("\\\n", "\n?")
