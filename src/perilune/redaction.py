"""Redacts the values of secrets in text, plain or encoded, by replacing them with "[NAME]".

A process registers each value that it reads (`register_secret`). All text that it writes afterwards passes
`redact`, `redact_text` or `redact_document`; `RedactedStream` does the same for text in pieces.

Values are searched in two views of a text. The first drops white space, quotes and backslashes, so that line
breaks, string literals and UTF-16 do not hide a value. The second also decodes percent, backslash and HTML
escapes. Both views are searched for the value, plain, reversed, in hexadecimal, and in Base64 at each of its
three alignments (standard and URL-safe), and for every long line of a value.

Standard library only, Python 3.8 or newer: bundles contain a copy of this file for other machines.
"""

from __future__ import annotations

import contextlib
import html
import json
import re
import sys
from base64 import b64encode, urlsafe_b64encode
from functools import lru_cache

TYPE_CHECKING = False  # instead of typing's: the runner imports as little as possible
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any, BinaryIO

    Places = Callable[[bytes], "tuple[list[int], list[int]]"]

MIN_SECRET_LENGTH = 4  # characters of a value; shorter ones occur in ordinary text
MIN_ENCODED_LENGTH = 6  # characters of an encoded form, for the same reason
MIN_LINE_LENGTH = 16  # characters from which a line of a value is redacted by itself, as in a PEM file
MAX_GAP_BYTES = 4096  # bytes that may separate the parts of a value
_BLOCK_BYTES = 1 << 20  # bytes read at once
MAX_ESCAPE_BYTES = 8  # approximate bytes of an escape of one byte

_DROPPED = b" \t\r\n\v\f\0\\\"'"
_KEPT = re.compile(b"[^" + re.escape(_DROPPED) + b"]+")
_HEX = b"[0-9A-Fa-f]"
_ESCAPE = (  # starts with a set of bytes, which the regex engine finds quickly
    rb"[%\\&](?:(?<=%)(?:25)*HH|(?<=&)(?:amp;)*#?[0-9A-Za-z]{1,8};|(?<=\\)\\*(?:"
    rb"u[dD][89abAB]HH\\+u[dD][c-fC-F]HH|uHHHH|U00HHHHHH|xHH|[abfnrtv]))"
).replace(b"H", _HEX)
_ESCAPES = re.compile(_ESCAPE)
_TOKENS = re.compile(b"(" + _ESCAPE + b")|[" + re.escape(_DROPPED) + b"]")
_CUT_ESCAPE = re.compile(  # at the end of a text
    rb"[%\\&](?:(?<=%)(?:25)*H?|(?<=&)(?:amp;)*#?[0-9A-Za-z]{0,8}|(?<=\\)\\*(?:"
    rb"u[dD][89abAB]HH\\+(?:uH{0,3})?|[uU]H{0,7}|xH?)?)\Z".replace(b"H", _HEX)
)


class Redactor:
    """Registered secrets, and the byte strings to search for."""

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}  # needle in a view to the name of its secret
        self._needles: tuple[bytes, ...] = ()  # the longest first
        self._window = 0  # bytes at the end of a text in which a value may start

    def register_secret(self, name: str, value: str) -> None:
        """Redact the value of the secret `name` from now on. A value that is too short is ignored."""
        if len(_drop_separators(value.encode("utf-8", "surrogateescape"))) < MIN_SECRET_LENGTH:
            return
        names = dict(self._names)
        for form in _search_forms(value):
            for needle in (_drop_separators(form), _drop_separators(_unescape(form))):
                if len(needle) >= MIN_SECRET_LENGTH:
                    names.setdefault(needle, name)
        self._names, self._needles = names, tuple(sorted(names, key=len, reverse=True))
        self._window = MAX_ESCAPE_BYTES * len(self._needles[0]) + MAX_GAP_BYTES

    def redact(self, data: bytes) -> bytes:
        """Replace every value in `data` by "[NAME]"."""
        return _replace_spans(data, self.find_spans(data)) if self._needles else data

    def find_spans(self, data: bytes) -> list[tuple[int, int, str]]:
        """Find the values in `data`: (first byte, byte after the last, name), in order, without overlaps.

        Overlapping values make one span with the name of the longest.
        """
        spans = [*self._find_in_view(data, _drop_separators(data), _map_squeezed)]
        if _may_contain_escape(data):
            spans += self._find_in_view(data, _drop_separators(_unescape(data)), _map_unescaped)
        merged: list[tuple[int, int, str]] = []
        widest = 0
        for start, end, name in sorted(spans):
            if not merged or start >= merged[-1][1]:
                merged.append((start, end, name))
                widest = end - start
            else:
                before = merged[-1]
                keeps = before[2] if widest >= end - start else name
                widest = max(widest, end - start)
                merged[-1] = (before[0], max(end, before[1]), keeps)
        return merged

    def _find_in_view(self, data: bytes, view: bytes, places: Places) -> Iterator[tuple[int, int, str]]:
        starts: list[int] = []
        ends: list[int] = []
        for needle in self._needles:
            index = view.find(needle)
            while index >= 0:
                if not starts:
                    starts, ends = places(data)
                yield starts[index], ends[index + len(needle) - 1], self._names[needle]
                index = view.find(needle, index + 1)

    def count_held_bytes(self, data: bytes) -> int:
        """Return the number of bytes at the end of `data` that may be the start of a value."""
        tail = data[-self._window :]
        count = self._count_partial_bytes(_drop_separators(tail), tail, _map_squeezed)
        if _may_contain_escape(tail):
            escape = _CUT_ESCAPE.search(tail)
            complete = tail[: escape.start()] if escape else tail
            cut = len(tail) - len(complete)
            begun = self._count_partial_bytes(_drop_separators(_unescape(complete)), complete, _map_unescaped)
            count = max(count, cut + begun)
        return count

    def _count_partial_bytes(self, view: bytes, text: bytes, places: Places) -> int:
        length = max(_count_overlap(view, needle) for needle in self._needles)
        return len(text) - places(text)[0][-length] if length else 0

    def find_secret(self, file: BinaryIO) -> str | None:
        """Return the name of the first secret whose value is in `file`. Reads the file in bounded memory."""
        tail = b""
        while self and (block := file.read(_BLOCK_BYTES)):
            tail += block
            if spans := self.find_spans(tail):
                return spans[0][2]
            tail = tail[-self._window :]
        return None

    def __bool__(self) -> bool:
        return bool(self._needles)


class RedactedStream:
    """Redacts text in pieces, which may split a value anywhere."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor, self._rest = redactor, b""

    def feed(self, data: bytes) -> bytes:
        """Add `data`; return the redacted text so far, without a possible start of a value at its end."""
        if not self._redactor:
            return data
        text = self._rest + data
        spans = self._redactor.find_spans(text)
        cut = len(text) - self._redactor.count_held_bytes(text)
        for start, end, _ in reversed(spans):
            cut = min(cut, start) if end > cut else cut
        self._rest = text[cut:]
        return _replace_spans(text[:cut], [span for span in spans if span[1] <= cut])

    def close(self) -> bytes:
        """Return the rest of the text, after the last piece."""
        rest, self._rest = self._rest, b""
        return self._redactor.redact(rest)


KNOWN_SECRETS = Redactor()  # of this process


def register_secret(name: str, value: str) -> None:
    """Redact the value of the secret `name` in all output of this process from now on."""
    KNOWN_SECRETS.register_secret(name, value)


def redact_text(text: str) -> str:
    """Redact the values of all known secrets in `text`."""
    if not KNOWN_SECRETS:
        return text
    data = text.encode("utf-8", "surrogatepass")
    redacted = KNOWN_SECRETS.redact(data)
    return text if redacted is data else redacted.decode("utf-8", "surrogatepass")


def redact_document(value: Any) -> Any:
    """Redact the values of all known secrets in the keys and strings of a JSON value."""
    if not KNOWN_SECRETS or not KNOWN_SECRETS.find_spans(json.dumps(value, default=str).encode()):
        return value
    return _redact_value(value)


def _redact_value(value: Any) -> Any:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, dict):
        return {_redact_value(key): _redact_value(item) for key, item in value.items()}
    return [_redact_value(item) for item in value] if isinstance(value, (list, tuple)) else value


@contextlib.contextmanager
def redact_output() -> Iterator[None]:
    """Redact what the block writes to `sys.stdout` and `sys.stderr`."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _RedactedText(before[0]), _RedactedText(before[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _RedactedText:
    """A text stream that redacts its writes and delegates everything else."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact_text(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _search_forms(value: str) -> Iterator[bytes]:
    """Yield the byte strings to search for: the value, its long lines, and its encodings."""
    plain = value.encode("utf-8", "surrogateescape")
    yield plain
    yield plain.replace(b" ", b"+")  # as in an HTML form
    yield from (line for line in plain.splitlines() if len(line.strip()) >= MIN_LINE_LENGTH)
    encoded = [value[::-1].encode("utf-8", "surrogateescape"), plain.hex().encode()]
    encoded.append(encoded[-1].upper())
    for offset, begin in ((0, 0), (1, 2), (2, 3)):  # the characters that no byte before the value affects
        end = (offset + len(plain)) * 8 // 6  # nor a byte after it
        for encode in (b64encode, urlsafe_b64encode):
            encoded.append(encode(bytes(offset) + plain)[begin:end])
    yield from (form for form in encoded if len(form) >= MIN_ENCODED_LENGTH)


def _may_contain_escape(data: bytes) -> bool:
    return b"%" in data or b"\\" in data or b"&" in data


def _drop_separators(data: bytes) -> bytes:
    return data.translate(None, _DROPPED)


def _unescape(data: bytes) -> bytes:
    return _ESCAPES.sub(lambda match: _decode_escape(match[0]), data)


@lru_cache(4096)
def _decode_escape(whole: bytes) -> bytes:
    """Decode an escape; empty for white space."""
    if whole[:1] == b"%":
        return bytes.fromhex(whole[-2:].decode())
    if whole[:1] == b"&":
        name = whole[:-1].rpartition(b";")[2].lstrip(b"&").decode()
        return html.unescape("&" + name + ";").encode("utf-8", "surrogatepass")
    code = whole.replace(b"\\", b"").decode()
    if code[0] == "x":
        return bytes.fromhex(code[1:])
    if code[0] == "u":
        wide = bytes.fromhex(code.replace("u", ""))
        return wide.decode("utf-16-be", "surrogatepass").encode("utf-8", "surrogatepass")
    if code[0] == "U" and int(code[1:], 16) < 0x110000:
        return chr(int(code[1:], 16)).encode("utf-8", "surrogatepass")
    return b""


def _map_squeezed(data: bytes) -> tuple[list[int], list[int]]:
    """Return the start and the end in `data` of each byte of the first view."""
    starts: list[int] = []
    for kept in _KEPT.finditer(data):
        starts.extend(range(kept.start(), kept.end()))
    return starts, [start + 1 for start in starts]


def _map_unescaped(data: bytes) -> tuple[list[int], list[int]]:
    """Return the start and the end in `data` of each byte of the second view, or of its escape."""
    starts: list[int] = []
    ends: list[int] = []
    position = 0
    for token in _TOKENS.finditer(data):
        starts.extend(range(position, token.start()))
        ends.extend(range(position + 1, token.start() + 1))
        position = token.end()
        if token[1] is not None:
            size = len(_drop_separators(_decode_escape(token[1])))
            starts.extend([token.start()] * size)
            ends.extend([position] * size)
    starts.extend(range(position, len(data)))
    ends.extend(range(position + 1, len(data) + 1))
    return starts, ends


def _count_overlap(text: bytes, needle: bytes) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of `needle`."""
    tail = text[-(len(needle) - 1) :]
    index = tail.find(needle[:1])
    while index >= 0 and not needle.startswith(tail[index:]):
        index = tail.find(needle[:1], index + 1)
    return len(tail) - index if index >= 0 else 0


def _replace_spans(data: bytes, spans: list[tuple[int, int, str]]) -> bytes:
    if not spans:
        return data
    parts, position = [], 0
    for start, end, name in spans:
        parts += [data[position:start], b"[" + name.encode() + b"]"]
        position = end
    return b"".join([*parts, data[position:]])
