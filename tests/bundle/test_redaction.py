"""Redaction finds secrets in every encoding that a program may print, across chunk boundaries too."""

import base64
import html
import json
import random
import urllib.parse
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.redaction import RedactedStream, Redactor, redact_document, redact_text, register_secret

VALUES = (
    "canary-7f3a91c4e5",
    "pa ss/w+o=r'd&<é>\\x",
    "日本語のパスワード",
    "https://me:h%20x@db.example.org/?a=1&b=2",
    "0123456789",
)


def base64_of(encode: Callable[[bytes], bytes], offset: int) -> Callable[[str], str]:
    return lambda value: encode(b"x" * offset + value.encode() + b"yz").decode()


def wrapped(text: str, width: int, end: str) -> str:
    return end.join(text[start : start + width] for start in range(0, len(text), width))


ENCODINGS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "reversed": lambda value: value[::-1],
    "hexadecimal": lambda value: value.encode().hex(),
    "hexadecimal, upper": lambda value: value.encode().hex().upper(),
    "hexadecimal, dumped": lambda value: value.encode().hex(" ", 2),
    **{f"base64 at {n}": base64_of(base64.b64encode, n) for n in range(3)},
    **{f"urlsafe base64 at {n}": base64_of(base64.urlsafe_b64encode, n) for n in range(3)},
    "base64, wrapped": lambda value: wrapped(base64.b64encode(value.encode() * 3).decode(), 7, "\n"),
    "base64 in a query": lambda value: urllib.parse.quote(base64.b64encode(value.encode()).decode(), ""),
    "URL": lambda value: urllib.parse.quote(value, ""),
    "URL, lower": lambda value: urllib.parse.quote(value, "").lower() if value.islower() else value,
    "URL, every byte": lambda value: "".join(f"%{byte:02x}" for byte in value.encode()),
    "URL in a URL": lambda value: urllib.parse.quote(urllib.parse.quote(value, ""), ""),
    "form": urllib.parse.quote_plus,
    "JSON": json.dumps,
    "JSON in JSON": lambda value: json.dumps(json.dumps(value)),
    "unicode escapes": lambda value: "".join(
        f"\\u{unit:04x}" for unit in memoryview(value.encode("utf-16-le")).cast("H")
    ),
    "representation": repr,
    "representation of bytes": lambda value: repr(value.encode()),
    "HTML": html.escape,
    "HTML, numbered": lambda value: "".join(f"&#{ord(char)};" for char in value),
    "one character a line": "\n".join,
    "lines, indented": lambda value: wrapped(value, 5, "\r\n    "),
    "string literals": lambda value: wrapped(value, 5, '"\n    "'),
}


def redactor_for(**values: str) -> Redactor:
    redactor = Redactor()
    for name, value in values.items():
        redactor.register_secret(name, value)
    return redactor


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_redactor_replaces_encoded_values_for_every_chunk_boundary(encoding: str) -> None:
    for value in VALUES:
        redactor = redactor_for(KEY=value)
        encoded = ENCODINGS[encoding](value)
        text = f"before it: {encoded} :after it\n".encode()
        whole = redactor.redact(text)
        assert whole.startswith(b"before it") and whole.endswith(b"after it\n") and b"[KEY]" in whole
        left = whole.replace(b"[KEY]", b"").removeprefix(b"before it:").removesuffix(b":after it\n").strip()
        assert len(left) <= 9, (value, whole)  # quotes, and Base64 characters shared with neighboring bytes
        for cut in range(1, len(text), 5):
            stream = RedactedStream(redactor)
            assert stream.feed(text[:cut]) + stream.feed(text[cut:]) + stream.close() == whole


def test_redactor_replaces_overlapping_values_completely() -> None:
    redactor = redactor_for(SHORT="alpha-beta", LONG="alpha-beta-gamma-delta", NEXT="delta-epsilon")
    text = b"a alpha-beta b alpha-beta-gamma-delta c alpha-beta-gamma-delta-epsilon d"
    whole = redactor.redact(text)
    assert whole == b"a [SHORT] b [LONG] c [LONG] d"
    for cut in range(1, len(text)):
        stream = RedactedStream(redactor)
        assert stream.feed(text[:cut]) + stream.feed(text[cut:]) + stream.close() == whole


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_stream_redacts_chunks_as_redact_does_whole_text(data: st.DataObject) -> None:
    redactor = redactor_for(A="abcab-secret", B="abcab-secret%41", C='a\\"b\nc')
    parts = st.sampled_from(
        ["abcab-secret", "abca", "%41", "\\u0061", "\\", "&amp;", "\n", " x", "%", "&", '"']
    )
    text = "".join(data.draw(st.lists(parts, max_size=20))).encode()
    stream, pieces, start = RedactedStream(redactor), [], 0
    while start < len(text):
        size = data.draw(st.integers(1, 7))
        pieces.append(stream.feed(text[start : start + size]))
        start += size
    assert b"".join([*pieces, stream.close()]) == redactor.redact(text)


def test_redactor_leaves_text_without_values_unchanged() -> None:
    redactor = redactor_for(**{f"KEY{number}": value for number, value in enumerate(VALUES)})
    noise = random.Random(0).randbytes(1 << 18)
    stream = RedactedStream(redactor)
    pieces = [stream.feed(noise[start : start + 1000]) for start in range(0, len(noise), 1000)]
    assert b"".join([*pieces, stream.close()]) == noise
    line = b"step 3, 45% done, loss 0.25 \\ C:\\new &c.\n"
    assert redactor.redact(line) == line


def test_redactor_replaces_single_lines_of_private_key() -> None:
    lines = [random.Random(n).randbytes(24).hex() for n in range(3)]
    redactor = redactor_for(KEY="-----BEGIN KEY-----\n" + "\n".join(lines) + "\n-----END KEY-----\n")
    text = "\n".join(f"12:00:0{n} | {line}" for n, line in enumerate(lines))
    assert redactor.redact(text.encode()).decode() == "\n".join(f"12:00:0{n} | [KEY]" for n in range(3))


def test_redact_document_and_redact_text_replace_learned_value() -> None:
    document = {"a": [1, 2.5, None, "key canary-7f3a91c4e5"], "canary-7f3a91c4e5": {"b": True}}
    assert redact_document(document) is document and redact_text("canary-7f3a91c4e5") == "canary-7f3a91c4e5"
    register_secret("KEY", "canary-7f3a91c4e5")
    assert redact_document(document) == {"a": [1, 2.5, None, "key [KEY]"], "[KEY]": {"b": True}}
    assert redact_text("lone \ud800 canary-7f3a91c4e5") == "lone \ud800 [KEY]"
