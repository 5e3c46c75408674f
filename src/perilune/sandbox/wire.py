"""The protocol between the sandbox and its supervisor: a length of eight hexadecimal digits, then JSON."""

import json
import os
from collections.abc import Mapping
from typing import Any

HEADER = 8
_CHUNK = 1 << 16


def encode_frame(document: Mapping[str, Any]) -> bytes:
    """Return a document as JSON after its length."""
    body = json.dumps(document).encode()
    return f"{len(body):0{HEADER}x}".encode() + body


def send_frame(descriptor: int, document: Mapping[str, Any]) -> None:
    """Write a whole document."""
    left = memoryview(encode_frame(document))
    while left:
        left = left[os.write(descriptor, left) :]


def receive_exactly(descriptor: int, size: int) -> bytes | None:
    """Read `size` bytes; None at the end of the stream."""
    received = bytearray()
    while len(received) < size:
        data = os.read(descriptor, min(size - len(received), _CHUNK))
        if not data:
            return None
        received += data
    return bytes(received)
