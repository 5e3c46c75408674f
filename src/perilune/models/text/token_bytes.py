"""The bytes that each token stands for, which a grammar over text needs and no tokenizer library tells.

Three kinds of vocabulary are understood, told apart by the decoder in tokenizer.json:

* byte-level BPE (GPT-2, Qwen, Llama 3): each character of a token stands for one byte;
* sentencepiece (Llama 2, Mistral, Gemma): "▁" stands for a space, and `<0x0A>` for a byte;
* tokens that are the text itself, joined without anything between (our character tokenizer).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import tokenizers

from perilune.errors import RequestError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_EDGES = ("Fuse", "Strip")  # what joins tokens, or trims only the whole text


def token_bytes(backend: tokenizers.Tokenizer, *, where: str = "tokenizer") -> list[bytes | None]:
    """Bytes of every token by id; None for control tokens, unknown tokens and holes: they are no text.

    Raises:
        RequestError: when the tokenizer joins tokens in a way that gives one of them no bytes of its own.
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
    """The function from a token's spelling to its bytes that `decoder` describes."""
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
        raise _unknown(None, where)  # without a decoder, tokens are joined with spaces

    def spelled(token: str) -> bytes:
        byte = BYTE_TOKEN.fullmatch(token) if "ByteFallback" in kinds else None
        if byte:
            return bytes([int(byte[1], 16)])
        return reduce(lambda text, pair: text.replace(*pair), replaced, token).encode()

    return spelled


def _unknown(kind: str | None, where: str) -> RequestError:
    found = f"a decoder of type {kind}" if kind else "no decoder"
    return RequestError(
        f"the tokenizer has {found}, so that the text of a token depends on its neighbours",
        where=where,
        remedy="use a byte-level, sentencepiece or character tokenizer where output is constrained",
    )


def byte_level(token: str) -> bytes:
    """Bytes of a token of a byte-level vocabulary."""
    return bytes(byte for character in token for byte in _BYTE_OF.get(character, character.encode()))


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's alphabet: printable bytes are written as themselves, the others as characters from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    others = (byte for byte in range(256) if byte not in printable)
    shifted = {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}
    return {chr(byte): bytes([byte]) for byte in sorted(printable)} | shifted


_BYTE_OF = _byte_alphabet()
