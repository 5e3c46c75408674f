"""Requests with descriptors over a control socket: a line of JSON each, answered before the next is sent."""

import json
import socket
from collections.abc import Iterator
from typing import Any

_READ = 65536


def read_requests(control: socket.socket, most: int) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yield each request with its descriptors, until the socket closes."""
    buffer = b""
    descriptors: list[int] = []
    while True:
        data, received, _, _ = socket.recv_fds(control, _READ, most)
        if not data:
            return
        buffer, descriptors = buffer + data, descriptors + received
        if buffer.endswith(b"\n"):
            yield json.loads(buffer), descriptors
            buffer, descriptors = b"", []
