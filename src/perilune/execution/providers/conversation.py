"""Run a command over one connection: send its input, receive its output and exit code."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from perilune.execution.hosts.protocol import MAX_OUTPUT_BYTES, TOO_MUCH_OUTPUT, Answer
from perilune.execution.providers.frames import BLOCK_BYTES, Kind, encode_frame, read_frame

MAX_ERROR_BYTES = 1 << 14  # of a command's stderr, from its end


class BrokenConnectionError(Exception):
    """The connection ended before the exit code arrived; the message is the last line of stderr."""


def run_conversation(
    wire: socket.socket, answers: BinaryIO, source: BinaryIO | None, sink: BinaryIO | None
) -> Answer:
    """Send a command's input and receive its output until it has ended.

    Args:
        wire: the connection, over which the command has already been requested.
        answers: the data received over it.
        source, sink: as for `Host.run`.

    Raises:
        BrokenConnectionError: it is unknown whether the command ran to its end.
        ValueError: the data is malformed.
    """
    threading.Thread(target=_feed, args=(wire, source), daemon=True).start()
    output, errors, total = bytearray(), bytearray(), 0
    while received := read_frame(answers):
        kind, data = received
        if (total := total + len(data)) > MAX_OUTPUT_BYTES:
            raise ValueError(TOO_MUCH_OUTPUT)
        match kind:
            case Kind.OUTPUT if sink is not None:
                sink.write(data)
            case Kind.OUTPUT:
                output += data
            case Kind.ERRORS:
                errors = (errors + data)[-MAX_ERROR_BYTES:]
            case Kind.EXIT:
                code = int(json.loads(data)["exit_code"])
                return Answer(code, bytes(output), errors.decode(errors="replace"))
            case _:
                raise ValueError("received a frame that only this side sends")
    lines = errors.decode(errors="replace").strip().splitlines() or ["the connection broke"]
    raise BrokenConnectionError(lines[-1])


@contextmanager
def close_after(wire: socket.socket, seconds: float) -> Iterator[threading.Event]:
    """Close the connection if the block takes longer than `seconds`; the event says whether that happened."""
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
    with contextlib.suppress(OSError, ValueError):  # the reader of the answers notices a broken connection
        while source is not None and (data := source.read(BLOCK_BYTES)):
            wire.sendall(encode_frame(Kind.INPUT, data))
        wire.sendall(encode_frame(Kind.INPUT_END))
