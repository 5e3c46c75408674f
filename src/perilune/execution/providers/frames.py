"""A command's stdin, stdout, stderr and exit code over one connection: frames of kind, length and bytes."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from io import BufferedIOBase
from typing import BinaryIO

from perilune.errors import WorkFailedError
from perilune.execution.hosts.protocol import Answer

HEAD = struct.Struct("!cI")
BLOCK = 1 << 16
LARGEST = 1 << 20
ERRORS_KEPT = 1 << 14  # bytes of a command's stderr


class Kind(Enum):
    """What a frame carries."""

    INPUT = b"i"
    INPUT_END = b"I"
    OUTPUT = b"o"
    ERRORS = b"e"
    EXIT = b"x"


class BrokenConnectionError(Exception):
    """It ended before the command's exit code had come; says the last that came on stderr."""


def frame(kind: Kind, data: bytes = b"") -> bytes:
    """One frame, as it goes over the wire."""
    return HEAD.pack(kind.value, len(data)) + data


def read_frame(stream: BinaryIO | BufferedIOBase) -> tuple[Kind, bytes] | None:
    """The next frame; None when the connection ended, be it within one.

    Raises:
        WorkFailedError: when what comes is no frame.
    """
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    letter, length = HEAD.unpack(head)
    if length > LARGEST or letter not in {kind.value for kind in Kind}:
        raise WorkFailedError("what came is no frame")
    data = stream.read(length)
    return None if len(data) < length else (Kind(letter), data)


def converse(
    wire: socket.socket, answers: BinaryIO, source: BinaryIO | None, sink: BinaryIO | None
) -> Answer:
    """Be the one who asked for a command: feed it, and take what it says until it has ended.

    Args:
        wire: the connection, where the command has been asked for already.
        answers: what comes over it.
        source, sink: as of `Host.run`.

    Raises:
        BrokenConnectionError: whether the command ran to its end is not known.
        WorkFailedError: when what comes makes no sense.
    """
    threading.Thread(target=_feed, args=(wire, source), daemon=True).start()
    output, errors = bytearray(), bytearray()
    while received := read_frame(answers):
        kind, data = received
        match kind:
            case Kind.OUTPUT if sink is not None:
                sink.write(data)
            case Kind.OUTPUT:
                output += data
            case Kind.ERRORS:
                errors = (errors + data)[-ERRORS_KEPT:]
            case Kind.EXIT:
                code = int(json.loads(data)["exit_code"])
                return Answer(code, bytes(output), errors.decode(errors="replace"))
            case _:
                raise WorkFailedError("a frame came that is ours to send")
    said = errors.decode(errors="replace").strip().splitlines() or ["the connection broke"]
    raise BrokenConnectionError(said[-1])


@contextmanager
def cut_after(wire: socket.socket, seconds: float) -> Iterator[threading.Event]:
    """Cut the connection when the body takes longer than that; the event tells whether it did."""
    late = threading.Event()

    def give_up() -> None:
        late.set()
        with contextlib.suppress(OSError):
            wire.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


def _feed(wire: socket.socket, source: BinaryIO | None) -> None:
    with contextlib.suppress(OSError, ValueError):  # whoever reads the answers is told that it broke
        while source is not None and (data := source.read(BLOCK)):
            wire.sendall(frame(Kind.INPUT, data))
        wire.sendall(frame(Kind.INPUT_END))
