"""From tokens to text as they come: whole characters only, and nothing of a text that ends the sample.

Text is added at boundaries only, where no later token changes it (`models/text/token_bytes.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from perilune.models.text.tokenizer import Tokenizer


class TextStream:
    """The text of one sample: piece by piece the same as `Tokenizer.decode` of all its tokens.

    Attributes:
        text: so far, up to a stop text.
        stopped: whether a stop text appeared.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._boundaries = tokenizer.boundaries
        # Tokens since the boundary before the last. The first `read` of them are text already; they are
        # decoded again because the spelling of a token may depend on the one before it.
        self._tokens: list[int] = []
        self._read = 0
        self._open = b""  # bytes since the last boundary
        self._sent = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int, *, may_stop: bool = True) -> None:
        """Take one more token; `stopped` says whether it completed a stop text."""
        if not self._boundaries.is_text(token):
            return
        self._tokens.append(token)
        self._open = self._boundaries.open_bytes(self._open, token)
        if not self._open:
            self._decode(may_stop)

    def finish(self) -> None:
        """No token follows: an unfinished character becomes replacement characters."""
        if self._read < len(self._tokens) and not self.stopped:
            self._decode(may_stop=True)

    def _decode(self, may_stop: bool) -> None:
        """Add the text of the tokens that were not read yet."""
        before = self._tokenizer.decode(self._tokens[: self._read])
        now = self._tokenizer.decode(self._tokens)
        del self._tokens[: self._read]
        self._read = len(self._tokens)
        self._add(now[len(before) :], may_stop)

    def take(self, *, last: bool) -> str:
        """The text not taken yet; but for the last time, without what may be the beginning of a stop text."""
        end = len(self.text) if last or self.stopped else len(self.text) - self._held()
        end = max(end, self._sent)
        new = self.text[self._sent : end]
        self._sent = end
        return new

    def _add(self, new: str, may_stop: bool) -> None:
        start = len(self.text)
        self.text += new
        if not may_stop:
            return
        found = []
        for stop in self._stops:
            # It ends in what is new: what came before was searched already, or did not count.
            at = self.text.find(stop, max(0, start - len(stop) + 1))
            if at >= 0:
                found.append(at)
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _held(self) -> int:
        """Characters at the end that are the beginning of a stop text."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stops):
                return length
        return 0
