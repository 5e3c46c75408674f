"""The bytes of each token, which the `tokenizers` library does not report.

The decoder in tokenizer.json distinguishes three kinds of vocabulary:

* byte-level BPE (GPT-2, Qwen, Llama 3): each character of a token stands for one byte;
* sentencepiece (Llama 2, Mistral, Gemma): "▁" stands for a space, and `<0x0A>` for a byte;
* plain text, joined without separators (the character tokenizer).
"""

import codecs
import json
import re
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import tokenizers

from perilune.errors import RequestError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_EDGES = ("Fuse", "Strip")  # decoders that join tokens or trim the whole text, not single tokens


def token_bytes(backend: tokenizers.Tokenizer, *, where: str = "tokenizer") -> list[bytes | None]:
    """Return the bytes of every token by id; None for control tokens, the unknown token and unused ids.

    Raises:
        RequestError: when the text of a token depends on its neighbors.
    """
    description = json.loads(backend.to_str())
    to_bytes = _reader(description.get("decoder"), where)
    added = backend.get_added_tokens_decoder()
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    unknown = description["model"].get("unk_token")
    table: list[bytes | None] = [None] * (1 + max(vocabulary.values(), default=-1))
    for token, index in vocabulary.items():
        if index in added:
            table[index] = None if added[index].special else added[index].content.encode()
        elif token != unknown:
            table[index] = to_bytes(token)
    return table


def _reader(decoder: Mapping[str, Any] | None, where: str) -> Callable[[str], bytes]:
    """Return the function from a token to its bytes, for the decoder in tokenizer.json."""
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return byte_level
    replaced = []
    for step in steps:
        if step["type"] == "Metaspace":
            replaced.append((step["replacement"], " "))
        elif step["type"] == "Replace" and "String" in step["pattern"]:
            replaced.append((step["pattern"]["String"], step["content"]))
        elif step["type"] not in (*_EDGES, "ByteFallback"):
            raise _unknown(step["type"], where)
    if not replaced and not kinds & {"Fuse", "ByteFallback"}:
        raise _unknown(None, where)  # without a decoder, spaces join the tokens

    def to_bytes(token: str) -> bytes:
        byte = BYTE_TOKEN.fullmatch(token) if "ByteFallback" in kinds else None
        if byte:
            return bytes([int(byte[1], 16)])
        return reduce(lambda text, pair: text.replace(*pair), replaced, token).encode()

    return to_bytes


def _unknown(kind: str | None, where: str) -> RequestError:
    decoder = f"a decoder of type {kind}" if kind else "no decoder"
    return RequestError(
        f"the tokenizer has {decoder}, so the text of a token depends on its neighbors",
        where=where,
        remedy="use a model with a byte-level, SentencePiece or character tokenizer",
    )


def byte_level(token: str) -> bytes:
    return bytes(byte for character in token for byte in _BYTE_OF.get(character, character.encode()))


def _byte_alphabet() -> dict[str, bytes]:
    """Return GPT-2's alphabet: printable bytes map to themselves, the others to characters from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    unprintable = (byte for byte in range(256) if byte not in printable)
    shifted = {chr(256 + index): bytes([byte]) for index, byte in enumerate(unprintable)}
    return {chr(byte): bytes([byte]) for byte in sorted(printable)} | shifted


_BYTE_OF = _byte_alphabet()


class Boundaries:
    """Positions between tokens where no later token changes the text so far.

    A character may be split over several tokens. Where boundaries are depends on the kind of vocabulary:

    * byte-level: the bytes of all tokens are decoded together. A boundary is a position where no character
      is incomplete.
    * byte fallback: a run of byte tokens such as `<0xE4>` becomes text only if the whole run is UTF-8, and
      one replacement character per byte otherwise. No position inside a run is a boundary.
    * others: every token ends at a boundary.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        kinds = {step["type"] for step in decoder.get("decoders", [decoder]) if step}
        self._backend = backend
        self._byte_level, self._byte_fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        self._special = {
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        }

    def is_text(self, token_id: int) -> bool:
        """Return whether a token is text, not a control token or an unused id."""
        return token_id not in self._special and self._backend.id_to_token(token_id) is not None

    def open_bytes(self, before: bytes, token_id: int) -> bytes:
        """Return the bytes after the last boundary; empty when the text ends at a boundary.

        Args:
            before: the result for the previous token.
            token_id: a token for which `is_text` is true.
        """
        token: str = self._backend.id_to_token(token_id) or ""
        if self._byte_level:
            data = before + byte_level(token)
            _, finished = codecs.utf_8_decode(data, "replace", False)
            return data[finished:]
        if self._byte_fallback and (byte := BYTE_TOKEN.fullmatch(token)):
            return before + bytes([int(byte[1], 16)])
        return b""
