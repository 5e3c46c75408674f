"""Redacts the values of secrets in text, plain or encoded, by replacing them with "[NAME]".

A process learns a value when it reads it (`learn`). All text that it writes afterwards passes `redact`,
`redact_text` or `redact_document`; `Stream` does the same for text in pieces.

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

SHORTEST = 4  # characters of a value; shorter ones occur in every text
SHORTEST_ENCODED = 6  # characters of an encoded form, for the same reason
LONG_LINE = 16  # characters from which a line of a value is a secret itself, as in a PEM file
SPREAD = 4096  # bytes that may separate the parts of a value
_BLOCK = 1 << 20  # bytes read at once
WIDEST_ESCAPE = 8  # approximate bytes of an escape of one byte

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
    """Secrets, and the byte strings to search for."""

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}  # needle in a view to the name of its secret
        self._needles: tuple[bytes, ...] = ()  # the longest first
        self._window = 0  # bytes at the end of a text in which a value may start

    def learn(self, name: str, value: str) -> None:
        """Redact the value of the secret `name` from now on. Ignores a value that is too short."""
        if len(_squeeze(value.encode("utf-8", "surrogateescape"))) < SHORTEST:
            return
        found = dict(self._names)
        for form in _forms(value):
            for needle in (_squeeze(form), _squeeze(_unescape(form))):
                if len(needle) >= SHORTEST:
                    found.setdefault(needle, name)
        self._names, self._needles = found, tuple(sorted(found, key=len, reverse=True))
        self._window = WIDEST_ESCAPE * len(self._needles[0]) + SPREAD

    def redact(self, data: bytes) -> bytes:
        """`data` with "[NAME]" in place of every value."""
        return _replaced(data, self.spans(data)) if self._needles else data

    def spans(self, data: bytes) -> list[tuple[int, int, str]]:
        """The spans of values in `data`: first byte, byte after the last, name; in order, without overlaps.

        Overlapping values make one span with the name of the longest.
        """
        found = [*self._in_view(data, _squeeze(data), _squeezed_places)]
        if _may_escape(data):
            found += self._in_view(data, _squeeze(_unescape(data)), _unescaped_places)
        merged: list[tuple[int, int, str]] = []
        widest = 0
        for start, end, name in sorted(found):
            if not merged or start >= merged[-1][1]:
                merged.append((start, end, name))
                widest = end - start
            else:
                before = merged[-1]
                keeps = before[2] if widest >= end - start else name
                widest = max(widest, end - start)
                merged[-1] = (before[0], max(end, before[1]), keeps)
        return merged

    def _in_view(self, data: bytes, view: bytes, places: Places) -> Iterator[tuple[int, int, str]]:
        starts: list[int] = []
        ends: list[int] = []
        for needle in self._needles:
            at = view.find(needle)
            while at >= 0:
                if not starts:
                    starts, ends = places(data)
                yield starts[at], ends[at + len(needle) - 1], self._names[needle]
                at = view.find(needle, at + 1)

    def unfinished(self, data: bytes) -> int:
        """The number of bytes at the end of `data` that may be the start of a value."""
        tail = data[-self._window :]
        held = self._begun(_squeeze(tail), tail, _squeezed_places)
        if _may_escape(tail):
            escape = _CUT_ESCAPE.search(tail)
            whole = tail[: escape.start()] if escape else tail
            cut = len(tail) - len(whole)
            begun = self._begun(_squeeze(_unescape(whole)), whole, _unescaped_places)
            held = max(held, cut + begun)
        return held

    def _begun(self, view: bytes, text: bytes, places: Places) -> int:
        length = max(_overlap(view, needle) for needle in self._needles)
        return len(text) - places(text)[0][-length] if length else 0

    def find(self, file: BinaryIO) -> str | None:
        """The name of the first secret whose value is in `file`, which is read in bounded memory."""
        tail = b""
        while self and (block := file.read(_BLOCK)):
            tail += block
            if spans := self.spans(tail):
                return spans[0][2]
            tail = tail[-self._window :]
        return None

    def __bool__(self) -> bool:
        return bool(self._needles)


class Stream:
    """Redacts text in pieces, which may split a value anywhere."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor, self._rest = redactor, b""

    def feed(self, data: bytes) -> bytes:
        """Add `data`; returns the redacted text so far, without a possible start of a value at its end."""
        if not self._redactor:
            return data
        text = self._rest + data
        spans = self._redactor.spans(text)
        cut = len(text) - self._redactor.unfinished(text)
        for start, end, _ in reversed(spans):
            cut = min(cut, start) if end > cut else cut
        self._rest = text[cut:]
        return _replaced(text[:cut], [span for span in spans if span[1] <= cut])

    def close(self) -> bytes:
        """The rest of the text, after the last piece."""
        rest, self._rest = self._rest, b""
        return self._redactor.redact(rest)


KNOWN = Redactor()  # all secrets that this process has read


def learn(name: str, value: str) -> None:
    """Redact the value of the secret `name` in everything that this process writes from now on."""
    KNOWN.learn(name, value)


def redact_text(text: str) -> str:
    """`text` with the values of all known secrets redacted."""
    if not KNOWN:
        return text
    data = text.encode("utf-8", "surrogatepass")
    found = KNOWN.redact(data)
    return text if found is data else found.decode("utf-8", "surrogatepass")


def redact_document(value: Any) -> Any:
    """A JSON value with all texts redacted."""
    if not KNOWN or not KNOWN.spans(json.dumps(value, default=str).encode()):
        return value
    return _redacted(value)


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, dict):
        return {_redacted(key): _redacted(item) for key, item in value.items()}
    return [_redacted(item) for item in value] if isinstance(value, (list, tuple)) else value


@contextlib.contextmanager
def redacted_output() -> Iterator[None]:
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


def _forms(value: str) -> Iterator[bytes]:
    """The forms of a value to search for."""
    plain = value.encode("utf-8", "surrogateescape")
    yield plain
    yield plain.replace(b" ", b"+")  # as in an HTML form
    yield from (line for line in plain.splitlines() if len(line.strip()) >= LONG_LINE)
    encoded = [value[::-1].encode("utf-8", "surrogateescape"), plain.hex().encode()]
    encoded.append(encoded[-1].upper())
    for offset, begin in ((0, 0), (1, 2), (2, 3)):  # the characters that no byte before the value affects
        end = (offset + len(plain)) * 8 // 6  # nor a byte after it
        for encode in (b64encode, urlsafe_b64encode):
            encoded.append(encode(bytes(offset) + plain)[begin:end])
    yield from (form for form in encoded if len(form) >= SHORTEST_ENCODED)


def _may_escape(data: bytes) -> bool:
    return b"%" in data or b"\\" in data or b"&" in data


def _squeeze(data: bytes) -> bytes:
    return data.translate(None, _DROPPED)


def _unescape(data: bytes) -> bytes:
    return _ESCAPES.sub(lambda found: _decode(found[0]), data)


@lru_cache(4096)
def _decode(whole: bytes) -> bytes:
    """The bytes of an escape; empty for white space."""
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


def _squeezed_places(data: bytes) -> tuple[list[int], list[int]]:
    """For each byte of the first view, its start and end in `data`."""
    starts: list[int] = []
    for kept in _KEPT.finditer(data):
        starts.extend(range(kept.start(), kept.end()))
    return starts, [start + 1 for start in starts]


def _unescaped_places(data: bytes) -> tuple[list[int], list[int]]:
    """For each byte of the second view, the start and end in `data` of what it stands for."""
    starts: list[int] = []
    ends: list[int] = []
    at = 0
    for token in _TOKENS.finditer(data):
        starts.extend(range(at, token.start()))
        ends.extend(range(at + 1, token.start() + 1))
        at = token.end()
        if token[1] is not None:
            made = len(_squeeze(_decode(token[1])))
            starts.extend([token.start()] * made)
            ends.extend([at] * made)
    starts.extend(range(at, len(data)))
    ends.extend(range(at + 1, len(data) + 1))
    return starts, ends


def _overlap(text: bytes, needle: bytes) -> int:
    """The number of bytes at the end of `text` that are the start, but not all, of `needle`."""
    tail = text[-(len(needle) - 1) :]
    at = tail.find(needle[:1])
    while at >= 0 and not needle.startswith(tail[at:]):
        at = tail.find(needle[:1], at + 1)
    return len(tail) - at if at >= 0 else 0


def _replaced(data: bytes, spans: list[tuple[int, int, str]]) -> bytes:
    if not spans:
        return data
    parts, at = [], 0
    for start, end, name in spans:
        parts += [data[at:start], b"[" + name.encode() + b"]"]
        at = end
    return b"".join([*parts, data[at:]])
