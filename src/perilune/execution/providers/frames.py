"""Frames that carry a command's stdin, stdout, stderr and exit code over one connection.

Uses only the standard library, because it is also sent to the machines of a Ray cluster.
"""

from __future__ import annotations

import hmac
import struct
from enum import Enum
from io import BufferedIOBase
from typing import BinaryIO

HEAD = struct.Struct("!cI")
BLOCK = 1 << 16
LARGEST = 1 << 20


class Kind(Enum):
    """The content of a frame."""

    INPUT = b"i"
    INPUT_END = b"I"
    OUTPUT = b"o"
    ERRORS = b"e"
    EXIT = b"x"
    HELLO = b"h"  # authentication before a command


def frame(kind: Kind, data: bytes = b"") -> bytes:
    """Return a frame as bytes."""
    return HEAD.pack(kind.value, len(data)) + data


def proof(token: str, *words: str) -> str:
    """Return the proof of knowing the token, as hexadecimal digits; no word may contain a zero byte."""
    return hmac.new(token.encode(), "\0".join(words).encode(), "sha256").hexdigest()


def read_frame(stream: BinaryIO | BufferedIOBase) -> tuple[Kind, bytes] | None:
    """Return the next frame; None if the connection ended, even within a frame.

    Raises:
        ValueError: the data is not a frame.
    """
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    letter, length = HEAD.unpack(head)
    if length > LARGEST or letter not in {kind.value for kind in Kind}:
        raise ValueError("received data that is not a frame")
    data = stream.read(length)
    return None if len(data) < length else (Kind(letter), data)
