"""Splits the text of an answer into reasoning, content and tool calls, while it is streamed or whole.

Reasoning stands in <think> ... </think> at the beginning, as in DeepSeek-R1 and Qwen3; tool calls stand in
<tool_call> ... </tool_call>, as in Hermes and Qwen. Text that may still become a mark is held back. A call
that is malformed or not closed stays content.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from perilune.data.tool_calls import ToolCall, read_calls

THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"


@dataclass(slots=True)
class Parts:
    """New parts of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class PartsReader:
    """Reads the text of one choice, piece by piece.

    Args:
        tools: whether calls are read; otherwise they are content.
        reasoning: whether reasoning is read; otherwise it is content.
        opened: whether the prompt ends with the beginning of the reasoning.
    """

    def __init__(self, *, tools: bool, reasoning: bool, opened: bool = False) -> None:
        self._tools = tools
        self._state: Literal["start", "reasoning", "content"] = "content"
        if reasoning:
            self._state = "reasoning" if opened else "start"
        self._held = ""
        self._fresh = False  # nothing but white space since the reasoning or the last call

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
            parts.reasoning, self._held, self._state, self._fresh = thought, rest, "content", True
            return
        held = "" if last else _may_begin(thought, THOUGHT)
        parts.reasoning, self._held = thought.removesuffix(held), held

    def _answer(self, parts: Parts, last: bool) -> None:
        while self._tools and CALL in self._held:
            before, _, rest = self._held.partition(CALL)
            inside, mark, after = rest.partition(CALLED)
            if not mark:
                break
            read = read_calls(f"{CALL}{inside}{CALLED}")
            if read is None:
                parts.content += self._said(f"{before}{CALL}{inside}{CALLED}")
            else:
                parts.content += self._said(before.rstrip())
                parts.calls += read[1]
                self._fresh = True
            self._held = after
        text = self._held
        held = "" if last or not self._tools else _undecided(text)
        parts.content += self._said(text.removesuffix(held))
        self._held = held

    def _said(self, text: str) -> str:
        """Content without the white space after reasoning or a call."""
        text = text.lstrip() if self._fresh else text
        self._fresh = self._fresh and not text
        return text


def _undecided(text: str) -> str:
    """The end of `text` that belongs to a call or may, with the white space before it."""
    call = text[text.find(CALL) :] if CALL in text else _may_begin(text, CALL)
    return text[len(text.removesuffix(call).rstrip()) :]


def _may_begin(text: str, mark: str) -> str:
    """The longest end of `text` with which `mark` may begin."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((mark[:length] for length in lengths if text.endswith(mark[:length])), "")
