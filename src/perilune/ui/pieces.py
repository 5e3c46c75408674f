"""The text that each token adds to an answer."""

from collections.abc import Sequence
from typing import Any

Piece = int | str  # an index into the vocabulary's table, or the text of a part of a character

_HALF = "\ufffd"  # decoded from a part of a character


class Vocabulary:
    """Texts of single tokens, in a table that grows as tokens occur.

    Args:
        document: text of tokenizer.json.

    Attributes:
        table: (text, is special) of the tokens so far; pieces are indices into it.
    """

    def __init__(self, document: str) -> None:
        import tokenizers

        try:
            self._backend: Any = tokenizers.Tokenizer.from_str(document)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a malformed file can panic inside the Rust library
            raise ValueError("not a tokenizer.json") from error
        added = self._backend.get_added_tokens_decoder()
        self._special = {token for token, entry in added.items() if entry.special}
        self._index: dict[int, int] = {}
        self.table: list[tuple[str, bool]] = []

    def prompt(self, token_ids: Sequence[int]) -> str:
        """Return the text of a prompt with special tokens."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))

    def pieces(self, token_ids: Sequence[int], text: str) -> list[Piece] | None:
        """Return one piece for each token; None if they do not join to `text` without special tokens."""
        alone = [self.alone(token) for token in token_ids]
        if self._joined(alone) == text:
            return list(alone)
        together = self.loose(token_ids)
        return together if self._joined(together) == text else None

    def alone(self, token: int) -> int:
        if token not in self._index:
            is_special = token in self._special
            text = self._backend.id_to_token(token) if is_special else self._backend.decode([token])
            self._index[token] = len(self.table)
            self.table.append((text or "", is_special))
        return self._index[token]

    def loose(self, token_ids: Sequence[int]) -> list[Piece]:
        """Return one piece for each token, without a text to join to. A character is at its last token."""
        pieces: list[Piece] = []
        pending: list[int] = []
        for token in token_ids:
            if token in self._special:
                pieces.append(self.alone(token))
                continue
            pending.append(token)
            text = self._backend.decode(pending)
            if text.endswith(_HALF):
                pieces.append("")
            else:
                pieces.append(text)
                pending = []
        if pending:  # the answer ends within a character
            index = max(index for index, piece in enumerate(pieces) if piece == "")
            pieces[index] = self._backend.decode(pending)
        return pieces

    def _joined(self, pieces: Sequence[Piece]) -> str:
        texts = []
        for piece in pieces:
            if isinstance(piece, str):
                texts.append(piece)
            elif not self.table[piece][1]:
                texts.append(self.table[piece][0])
        return "".join(texts)
