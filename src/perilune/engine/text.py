"""The text of a sample as a stream: only whole characters, and no part of a stop text.

Text is added only at boundaries, where no later token changes it (`models/text/token_bytes.py`).
"""

from collections.abc import Sequence

from perilune.models.text.tokenizer import Tokenizer


class TextStream:
    """The text of one sample. The pieces together equal `Tokenizer.decode` of all tokens.

    Attributes:
        text: the text so far, up to a stop text.
        stopped: whether a stop text appeared.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._boundaries = tokenizer.boundaries
        # Tokens since the second to last boundary. The text of the first `_read` tokens is in `text` already.
        # They are decoded again because the text of a token may depend on the token before.
        self._tokens: list[int] = []
        self._read = 0
        self._open = b""  # bytes since the last boundary
        self._sent = 0  # characters of the text that `take_text` has returned
        self.text = ""
        self.stopped = False

    def push(self, token: int, *, may_stop: bool = True) -> None:
        """Add a token. Sets `stopped` if it completes a stop text."""
        if not self._boundaries.is_text(token):
            return
        self._tokens.append(token)
        self._open = self._boundaries.open_bytes(self._open, token)
        if not self._open:
            self._decode(may_stop)

    def finish(self) -> None:
        """End the text: an incomplete character becomes replacement characters."""
        if self._read < len(self._tokens) and not self.stopped:
            self._decode(may_stop=True)

    def _decode(self, may_stop: bool) -> None:
        """Add the text of the new tokens."""
        before = self._tokenizer.decode(self._tokens[: self._read])
        now = self._tokenizer.decode(self._tokens)
        del self._tokens[: self._read]
        self._read = len(self._tokens)
        self._add(now[len(before) :], may_stop)

    def take_text(self, *, last: bool) -> str:
        """Return the text since the last call; unless `last`, hold back an end that may begin a stop text."""
        end = len(self.text)
        if not (last or self.stopped):
            end -= max((_partial_match_length(self.text, stop) for stop in self._stops), default=0)
        end = max(end, self._sent)
        new = self.text[self._sent : end]
        self._sent = end
        return new

    def _add(self, new: str, may_stop: bool) -> None:
        start = len(self.text)
        self.text += new
        if not may_stop:
            return
        matches = []
        for stop in self._stops:
            # A stop text must end in the new text. Older text was searched before, or `may_stop` was false.
            index = self.text.find(stop, max(0, start - len(stop) + 1))
            if index >= 0:
                matches.append(index)
        if matches:
            self.text, self.stopped = self.text[: min(matches)], True


def _partial_match_length(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of `stop`."""
    end = text[max(0, len(text) - len(stop) + 1) :]
    index = end.find(stop[0])
    while index >= 0 and not stop.startswith(end[index:]):
        index = end.find(stop[0], index + 1)
    return len(end) - index if index >= 0 else 0
