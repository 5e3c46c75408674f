"""Splits the text of an answer into reasoning, content and tool calls, for streamed and whole answers.

Reasoning is in <think> ... </think> at the beginning, as in DeepSeek-R1 and Qwen3. Readers hold back text
that may still become a mark or a call. A call that is malformed or incomplete is content.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from perilune.data.tool_calls import ToolCall
from perilune.serve.forced_calls import CallPart, ForcedCalls
from perilune.serve.tool_formats import MAX_CALLS, Brackets, ToolFormat, find_mark

THINK_START, THINK_END = "<think>", "</think>"

Kind = Literal["reasoning", "content"]
Beginning = Literal["start", "reasoning", "content", "channels"]
"""The text at the start of an answer: "start" for reasoning or content, "reasoning" for the rest of reasoning
that the prompt began, "content", or "channels" for the header of a message (see `ChannelsReader`)."""


@dataclass(slots=True)
class Parts:
    """New parts of an answer.

    Attributes:
        items: texts with their kinds, and parts of calls, in the order of the answer.
    """

    items: list[tuple[Kind, str] | CallPart] = field(default_factory=list)

    def add(self, kind: Kind, text: str) -> None:
        """Add a text, unless it is empty."""
        if text:
            self.items.append((kind, text))

    def add_calls(self, parts: Iterable[CallPart]) -> None:
        """Add parts of calls. Arguments are appended to a preceding part of the same call."""
        for part in parts:
            if part[0] == "arguments" and self.items and isinstance(call := self.items[-1][1], tuple):
                name, arguments = call
                self.items[-1] = "call", (name, arguments + part[1])
            else:
                self.items.append(part)

    @property
    def reasoning(self) -> str:
        return "".join(text for kind, text in self.items if kind == "reasoning" and isinstance(text, str))

    @property
    def content(self) -> str:
        return "".join(text for kind, text in self.items if kind == "content" and isinstance(text, str))

    @property
    def calls(self) -> list[ToolCall]:
        """All calls that begin in these parts."""
        return [call for _, call in self.items if isinstance(call, tuple)]


class Reader(Protocol):
    """A parser that splits the text of one choice, piece by piece."""

    def feed(self, text: str, *, last: bool) -> Parts:
        """Return the parts that can be read with more text; `last` flushes the text that was held back."""


class PartsReader:
    """Reads the text of one choice, piece by piece.

    Args:
        calls: the format of calls; None if calls are content.
        beginning: the kind of text at the start.
        max_calls: maximum number of calls; further calls are dropped.
        forced: whether a grammar limits the content to calls in this format. The reader then passes on
            arguments while they are generated, without canonical formatting.
    """

    def __init__(
        self,
        *,
        calls: ToolFormat | None,
        beginning: Beginning = "content",
        max_calls: int = MAX_CALLS,
        forced: bool = False,
    ) -> None:
        self._format, self._calls_left = calls, max_calls
        self._forced = ForcedCalls.of_format(calls) if forced else None
        self._state = beginning
        self._buffer = ""
        self._skip_whitespace = False  # only white space since the reasoning or the last call
        self._at_start = True  # only white space as content so far
        self._brackets = Brackets(calls.quotes) if calls is not None else Brackets()

    def feed(self, text: str, *, last: bool) -> Parts:
        """Return the parts that can be read with more text; `last` flushes the text that was held back."""
        self._buffer += text
        parts = Parts()
        if self._state == "start":
            self._detect_reasoning(last)
        if self._state == "reasoning":
            self._read_reasoning(parts, last)
        if self._state == "content":
            self._read_content(parts, last)
        return parts

    def _detect_reasoning(self, last: bool) -> None:
        begun = self._buffer.lstrip()
        if begun.startswith(THINK_START):
            self._state, self._buffer = "reasoning", begun.removeprefix(THINK_START)
        elif last or not THINK_START.startswith(begun):
            self._state = "content"

    def _read_reasoning(self, parts: Parts, last: bool) -> None:
        thought, mark, rest = self._buffer.partition(THINK_END)
        if mark:
            parts.add("reasoning", thought)
            self._buffer, self._state, self._skip_whitespace = rest, "content", True
            return
        end = len(thought) if last else find_mark(thought, THINK_END)
        parts.add("reasoning", thought[:end])
        self._buffer = thought[end:]

    def _read_content(self, parts: Parts, last: bool) -> None:
        if self._forced is not None:
            parts.add_calls(self._forced.feed(self._buffer))
            self._buffer = ""
            return
        if self._format is None:
            self._add_content(parts, self._buffer)
            self._buffer = ""
            return
        while self._buffer:
            start = self._format.find_call(self._buffer, at_start=self._at_start)
            before = self._buffer[:start]
            rest = self._buffer[start:]
            parsed = self._format.parse(rest, self._brackets) if rest else None
            if parsed is None:
                # White space before a call belongs to it.
                content = self._buffer if last else before.rstrip()
                self._add_content(parts, content)
                self._buffer = self._buffer[len(content) :]
                return
            end = start + parsed.length
            self._add_content(parts, before.rstrip() if parsed.calls else self._buffer[:end])
            self._buffer, self._brackets = self._buffer[end:], Brackets(self._format.quotes)
            if parsed.calls:
                for call in parsed.calls[: self._calls_left]:
                    parts.add_calls([("call", call), ("end", "")])
                self._calls_left -= min(len(parsed.calls), self._calls_left)
                self._skip_whitespace = True

    def _add_content(self, parts: Parts, text: str) -> None:
        """Add content without the white space after reasoning or a call."""
        text = text.lstrip() if self._skip_whitespace else text
        self._skip_whitespace = self._skip_whitespace and not text
        self._at_start = self._at_start and not text.strip()
        parts.add("content", text)
