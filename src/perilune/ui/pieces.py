"""The text that each token adds to an answer."""

from collections.abc import Sequence
from typing import Any

Piece = int | str  # an index into the vocabulary's table, or a text

_HALF = "\ufffd"  # what a part of a character decodes to


class Vocabulary:
    """The texts of the tokens that occurred so far.

    Args:
        document: text of tokenizer.json.

    Attributes:
        table: (text, is special) by index; pieces are indices into it.
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
        single: list[Piece] = [self.token_piece(token) for token in token_ids]
        if self._joined(single) == text:
            return single
        decoded = self.decode_pieces(token_ids)
        return decoded if self._joined(decoded) == text else None

    def token_piece(self, token: int) -> int:
        """Return the index of a token's text in `table`, adding the text if it is new."""
        if token not in self._index:
            is_special = token in self._special
            text = self._backend.id_to_token(token) if is_special else self._backend.decode([token])
            self._index[token] = len(self.table)
            self.table.append((text or "", is_special))
        return self._index[token]

    def decode_pieces(self, token_ids: Sequence[int]) -> list[Piece]:
        """Return one piece for each token. The last token of a character gets the whole character."""
        pieces: list[Piece] = []
        pending: list[int] = []
        for token in token_ids:
            if token in self._special:
                pieces.append(self.token_piece(token))
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
