"""Splits the text of an answer into reasoning, content and tool calls, while it is streamed or whole.

Reasoning stands in <think> ... </think> at the beginning, as in DeepSeek-R1 and Qwen3. Text that may still
become a mark or a call is held back. A call that is malformed or incomplete is content.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from perilune.data.tool_calls import ToolCall
from perilune.serve.forced_calls import CallPart, ForcedCalls
from perilune.serve.tool_formats import MOST_CALLS, Brackets, ToolFormat

THINK, THOUGHT = "<think>", "</think>"

Kind = Literal["reasoning", "content"]
Beginning = Literal["start", "reasoning", "content", "channels"]
"""What an answer begins with: reasoning or content ("start"), the rest of the reasoning, content, or the
header of a message (see `ChannelsReader`)."""


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
        """Add parts of calls; arguments are joined with those of the same call before them."""
        for part in parts:
            if part[0] == "arguments" and self.items and isinstance(call := self.items[-1][1], tuple):
                name, arguments = call
                self.items[-1] = "call", (name, arguments + part[1])
            else:
                self.items.append(part)

    @property
    def reasoning(self) -> str:
        """All reasoning."""
        return "".join(one for kind, one in self.items if kind == "reasoning" and isinstance(one, str))

    @property
    def content(self) -> str:
        """All content."""
        return "".join(one for kind, one in self.items if kind == "content" and isinstance(one, str))

    @property
    def calls(self) -> list[ToolCall]:
        """All calls that begin here."""
        return [one for _, one in self.items if isinstance(one, tuple)]


class Reader(Protocol):
    """Splits the text of one choice."""

    def feed(self, text: str, *, last: bool) -> Parts:
        """The parts that follow from more text; `last` gives up what was held back."""
        ...


class PartsReader:
    """Reads the text of one choice, piece by piece.

    Args:
        calls: the format of calls; None if calls are content.
        begins: what the text begins with.
        most_calls: further calls are left out.
        forced: whether a grammar holds the content to calls in this format. Their arguments are passed on
            while they are generated, and as they are spelled.
    """

    def __init__(
        self,
        *,
        calls: ToolFormat | None,
        begins: Beginning = "content",
        most_calls: int = MOST_CALLS,
        forced: bool = False,
    ) -> None:
        self._format, self._calls_left = calls, most_calls
        spelling = calls.spelling if forced and calls is not None else None
        self._forced = None if spelling is None else ForcedCalls(spelling)
        self._state = begins
        self._held = ""
        self._fresh = False  # nothing but white space since the reasoning or the last call
        self._at_start = True  # no content but white space so far
        self._brackets = Brackets(calls.quotes) if calls is not None else Brackets()

    def feed(self, text: str, *, last: bool) -> Parts:
        """The parts that follow from more text; `last` gives up what was held back."""
        self._held += text
        parts = Parts()
        if self._state == "start":
            self._begin(last)
        if self._state == "reasoning":
            self._reason(parts, last)
        if self._state == "content":
            self._answer(parts, last)
        return parts

    def _begin(self, last: bool) -> None:
        begun = self._held.lstrip()
        if begun.startswith(THINK):
            self._state, self._held = "reasoning", begun.removeprefix(THINK)
        elif last or not THINK.startswith(begun):
            self._state = "content"

    def _reason(self, parts: Parts, last: bool) -> None:
        thought, mark, rest = self._held.partition(THOUGHT)
        if mark:
            parts.add("reasoning", thought)
            self._held, self._state, self._fresh = rest, "content", True
            return
        held = "" if last else _may_begin(thought, THOUGHT)
        parts.add("reasoning", thought.removesuffix(held))
        self._held = held

    def _answer(self, parts: Parts, last: bool) -> None:
        if self._forced is not None:
            parts.add_calls(self._forced.feed(self._held))
            self._held = ""
            return
        if self._format is None:
            self._say(parts, self._held)
            self._held = ""
            return
        while self._held:
            start = self._format.begin(self._held, at_start=self._at_start)
            before = self._held[:start]
            found = self._format.read(self._held[start:], self._brackets) if start < len(self._held) else None
            if found is None:
                # White space before a call belongs to it.
                said = self._held if last else before.rstrip()
                self._say(parts, said)
                self._held = self._held[len(said) :]
                return
            end = start + found.length
            self._say(parts, before.rstrip() if found.calls else self._held[:end])
            self._held, self._brackets = self._held[end:], Brackets(self._format.quotes)
            if found.calls:
                for call in found.calls[: self._calls_left]:
                    parts.add_calls([("call", call), ("end", "")])
                self._calls_left -= min(len(found.calls), self._calls_left)
                self._fresh = True

    def _say(self, parts: Parts, text: str) -> None:
        """Add content without the white space after reasoning or a call."""
        text = text.lstrip() if self._fresh else text
        self._fresh = self._fresh and not text
        self._at_start = self._at_start and not text.strip()
        parts.add("content", text)


def _may_begin(text: str, mark: str) -> str:
    """The longest end of `text` with which `mark` may begin."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((mark[:length] for length in lengths if text.endswith(mark[:length])), "")
