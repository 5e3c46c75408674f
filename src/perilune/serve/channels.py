"""Splits the text of an answer in OpenAI's harmony format, which gpt-oss writes.

An answer is one or more messages. Each has a header with its channel, and for a call its recipient:

    <|channel|>analysis<|message|>2 and 2 ...<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

Source: the harmony response format, https://cookbook.openai.com/articles/openai-harmony.
"""

import re

from perilune.serve.forced_calls import ForcedCalls
from perilune.serve.parts import Beginning, Kind, Parts
from perilune.serve.tool_formats import MAX_CALLS, NAME, Brackets, ToolFormat

_MESSAGE = "<|message|>"
_END = re.compile(r"<\|(?:end|call|return|start)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(rf"\bto=functions\.{NAME}")
_NO_HEADER = re.compile(r"\s*(?!<|t(?:o(?:=|\Z)|\Z))\S")
_PART_OF_END = re.compile(r"<(?:\|[a-z]{0,6}\|?)?\Z")


class ChannelsReader:
    """Reads the text of one choice, piece by piece.

    The channel `analysis` is reasoning; all others are content. The reader holds back headers, calls, and
    text that may become a mark. A malformed call, and an answer without a header, are content.

    Args:
        calls: the format of calls; None if calls are content.
        beginning: "content" if the answer continues a message, otherwise "channels".
        max_calls: maximum number of calls; further calls are dropped.
        forced: as in `PartsReader`.
    """

    def __init__(
        self,
        *,
        calls: ToolFormat | None,
        beginning: Beginning = "channels",
        max_calls: int = MAX_CALLS,
        forced: bool = False,
    ) -> None:
        self._format, self._calls_left = calls, max_calls
        self._forced = ForcedCalls.of_format(calls) if forced else None
        self._kind: Kind | None = "content" if beginning == "content" else None  # of the open message
        self._header: str | None = None  # of the open message if it is a call
        self._at_start = True  # no message has begun
        self._buffer, self._searched = "", 0  # the buffer has no end mark before index `_searched`

    def feed(self, text: str, *, last: bool) -> Parts:
        """Return the parts that can be read with more text; `last` flushes the text that was held back."""
        self._buffer += text
        parts = Parts()
        while self._read_header(last) if self._kind is None else self._read_body(parts, last):
            pass
        return parts

    def _read_header(self, last: bool) -> bool:
        """Read the header of the next message; False while more text is needed."""
        header, mark, rest = self._buffer.partition(_MESSAGE)
        if self._at_start and _NO_HEADER.match(self._buffer):
            self._kind = "content"
        elif mark:
            channel = _CHANNEL.search(header)
            self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "content"
            self._header = header if self._format is not None and _RECIPIENT.search(header) else None
            if self._forced is None or self._header is None:
                self._buffer = rest
        elif last and self._buffer:
            self._kind = "content"
        self._at_start = self._at_start and self._kind is None
        return self._kind is not None

    def _read_body(self, parts: Parts, last: bool) -> bool:
        """Read the text of the open message; False while more text is needed."""
        assert self._kind is not None
        if self._forced is not None and self._header is not None:
            parts.add_calls(self._forced.feed(self._buffer))
            self._buffer = ""
            return False
        end = _END.search(self._buffer, self._searched)
        if end is None and self._header is not None and not last:
            self._searched = max(0, len(self._buffer) - len("<|return|>"))
            return False
        self._searched = 0
        cut = end or (None if last else _PART_OF_END.search(self._buffer))
        text = self._buffer if cut is None else self._buffer[: cut.start()]
        self._buffer = self._buffer[len(text) + (0 if end is None else len(end[0])) :]
        if self._header is not None:
            self._call(parts, text)
        else:
            parts.add(self._kind, text)
        if end is not None:
            self._kind = self._header = None
        return end is not None and bool(self._buffer)

    def _call(self, parts: Parts, arguments: str) -> None:
        assert self._format is not None and self._header is not None
        parsed = self._format.parse(f"{self._header}{_MESSAGE}{arguments}<|call|>", Brackets())
        if parsed is None or not parsed.calls:
            parts.add("content", arguments)
        elif self._calls_left:
            self._calls_left -= 1
            parts.add_calls([("call", parsed.calls[0]), ("end", "")])
