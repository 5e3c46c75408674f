"""From tokens to text as they come: whole characters only, and nothing of a text that ends the sample."""

from __future__ import annotations

from collections.abc import Sequence

from perilune.models.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"  # what a tokenizer makes of the first bytes of a character
_PATIENCE = 4  # tokens: a character has at most four bytes, so later this is what the tokens really say


class TextStream:
    """The text of one sample.

    Attributes:
        text: so far, up to a stop text.
        stopped: whether a stop text appeared.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens: list[int] = []
        self._context, self._read = 0, 0  # tokens decoded again so that the next is spelled as in its place
        self._sent = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int, *, may_stop: bool = True) -> None:
        """Take one more token; `stopped` says whether it completed a stop text."""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._context : self._read])
        now = self._tokenizer.decode(self._tokens[self._context :])
        if now.endswith(_UNFINISHED) and len(self._tokens) - self._read < _PATIENCE:
            return
        self._add(now[len(before) :], may_stop)
        self._context, self._read = self._read, len(self._tokens)

    def finish(self) -> None:
        """No token follows: what looked unfinished is all there is."""
        if self._read < len(self._tokens) and not self.stopped:
            before = self._tokenizer.decode(self._tokens[self._context : self._read])
            self._add(self._tokenizer.decode(self._tokens[self._context :])[len(before) :], may_stop=True)
            self._read = len(self._tokens)

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
