"""A command's stdin, stdout, stderr and exit code over one connection: frames of kind, length and bytes.

The standard library alone: it travels to machines of others.
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
    """What a frame carries."""

    INPUT = b"i"
    INPUT_END = b"I"
    OUTPUT = b"o"
    ERRORS = b"e"
    EXIT = b"x"
    HELLO = b"h"  # before a command, where both sides have to show who they are


def frame(kind: Kind, data: bytes = b"") -> bytes:
    """One frame, as it goes over the wire."""
    return HEAD.pack(kind.value, len(data)) + data


def proof(token: str, *words: str) -> str:
    """That whoever says these words knows the token, as hexadecimal digits; no word holds a zero byte."""
    return hmac.new(token.encode(), "\0".join(words).encode(), "sha256").hexdigest()


def read_frame(stream: BinaryIO | BufferedIOBase) -> tuple[Kind, bytes] | None:
    """The next frame; None when the connection ended, be it within one.

    Raises:
        ValueError: when what comes is no frame.
    """
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    letter, length = HEAD.unpack(head)
    if length > LARGEST or letter not in {kind.value for kind in Kind}:
        raise ValueError("what came is no frame")
    data = stream.read(length)
    return None if len(data) < length else (Kind(letter), data)
