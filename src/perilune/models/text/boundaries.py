"""Boundaries of characters between tokens: where no later token changes the text so far.

A character may be split over several tokens. How a tokenizer writes bytes that make no character depends on
its decoder in tokenizer.json:

* byte-level (GPT-2, Qwen, Llama 3): the bytes of all tokens are decoded together; a boundary is where no
  character is unfinished.
* byte fallback (Llama 2, Mistral, Gemma): a run of byte tokens such as `<0xE4>` becomes characters only if
  all of it is UTF-8, and a replacement character for each byte otherwise; a boundary is where it has ended.
* others: every token ends at a boundary.
"""

from __future__ import annotations

import codecs
import json

import tokenizers

from perilune.models.text.token_bytes import BYTE_TOKEN, byte_level


class Boundaries:
    """Of one tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        kinds = {step["type"] for step in decoder.get("decoders", [decoder]) if step}
        self._backend = backend
        self._byte_level, self._byte_fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        self._special = {
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        }

    def is_text(self, token_id: int) -> bool:
        """Whether a token is part of the text: control tokens and ids without a token are not."""
        return token_id not in self._special and self._backend.id_to_token(token_id) is not None

    def open_bytes(self, before: bytes, token_id: int) -> bytes:
        """The bytes after the last boundary; empty when the text ends at one.

        Args:
            before: what this function returned for the token before.
            token_id: one that `is_text`.
        """
        token: str = self._backend.id_to_token(token_id) or ""
        if self._byte_level:
            data = before + byte_level(token)
            _, finished = codecs.utf_8_decode(data, "replace", False)
            return data[finished:]
        if self._byte_fallback and (byte := BYTE_TOKEN.fullmatch(token)):
            return before + bytes([int(byte[1], 16)])
        return b""
