"""Frames that carry a command's stdin, stdout, stderr and exit code over one connection.

Uses only the standard library, because it is also sent to the machines of a Ray cluster.
"""

from __future__ import annotations

import hmac
import struct
from enum import Enum
from io import BufferedIOBase
from typing import BinaryIO

FRAME_HEADER = struct.Struct("!cI")
BLOCK_BYTES = 1 << 16
MAX_FRAME_BYTES = 1 << 20
READY_PREFIX = "perilune-ready "  # prefix of the line in which a job describes its machines


class Kind(Enum):
    """The content of a frame."""

    INPUT = b"i"
    INPUT_END = b"I"
    OUTPUT = b"o"
    ERRORS = b"e"
    EXIT = b"x"
    HELLO = b"h"  # authentication before a command


def encode_frame(kind: Kind, data: bytes = b"") -> bytes:
    return FRAME_HEADER.pack(kind.value, len(data)) + data


def token_proof(token: str, *words: str) -> str:
    """Return the proof of knowing the token, as hexadecimal digits; no word may contain a zero byte."""
    return hmac.new(token.encode(), "\0".join(words).encode(), "sha256").hexdigest()


def read_frame(stream: BinaryIO | BufferedIOBase) -> tuple[Kind, bytes] | None:
    """Return the next frame; None if the connection ended, even within a frame.

    Raises:
        ValueError: the data is not a frame.
    """
    head = stream.read(FRAME_HEADER.size)
    if len(head) < FRAME_HEADER.size:
        return None
    letter, length = FRAME_HEADER.unpack(head)
    if length > MAX_FRAME_BYTES or letter not in {kind.value for kind in Kind}:
        raise ValueError("received data that is not a frame")
    data = stream.read(length)
    return None if len(data) < length else (Kind(letter), data)
