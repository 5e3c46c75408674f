"""Asking for a command over one connection: its input goes there, all that it says comes back."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from perilune.execution.hosts.protocol import Answer
from perilune.execution.providers.frames import BLOCK, Kind, frame, read_frame

ERRORS_KEPT = 1 << 14  # bytes of a command's stderr


class BrokenConnectionError(Exception):
    """It ended before the command's exit code had come; says the last that came on stderr."""


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
        ValueError: when what comes makes no sense.
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
                raise ValueError("a frame came that is ours to send")
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
