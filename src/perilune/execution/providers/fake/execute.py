"""Run one command on a fake machine: connect an HTTP connection to the machine's first process."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedIOBase

from perilune.execution.providers.fake.machines import Machine
from perilune.execution.providers.frames import BLOCK_BYTES, Kind, encode_frame, read_frame

LINGER = 2.0  # seconds to wait for output of background processes after the exit
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: frames\r\n\r\n"


def execute(
    client: socket.socket, requests: BufferedIOBase, machine: Machine, command: Sequence[str]
) -> None:
    """Run `command` on `machine` and transfer its data; returns when it has ended or either side is gone.

    As with ssh, the command does not end with the connection.

    Raises:
        OSError: the machine does not answer.
    """
    with machine.connect() as box, _pipes() as (inside, stdin, stdout, stderr):
        message = json.dumps({"command": list(command)}).encode()
        socket.send_fds(box, [message], inside)
        for descriptor in inside:
            os.close(descriptor)
        client.settimeout(None)
        client.sendall(SWITCH)
        lock = threading.Lock()

        def send(kind: Kind, data: bytes) -> None:
            with lock:
                client.sendall(encode_frame(kind, data))

        def forward(descriptor: int, kind: Kind) -> None:
            with contextlib.suppress(OSError):
                while data := os.read(descriptor, BLOCK_BYTES):
                    send(kind, data)

        def feed() -> None:
            with contextlib.suppress(OSError):
                while (received := read_frame(requests)) and received[0] is Kind.INPUT:
                    _write_all(stdin, received[1])
            os.close(stdin)

        threading.Thread(target=feed, daemon=True).start()
        outputs = [
            threading.Thread(target=forward, args=pair, daemon=True)
            for pair in ((stdout, Kind.OUTPUT), (stderr, Kind.ERRORS))
        ]
        for output in outputs:
            output.start()
        ended = box.recv(BLOCK_BYTES)
        for output in outputs:
            output.join(LINGER)
        if ended:
            with contextlib.suppress(OSError):
                send(Kind.EXIT, ended)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)  # which ends `feed`


@contextmanager
def _pipes() -> Iterator[tuple[list[int], int, int, int]]:
    """Yield three pipes: the command's ends, then this side's ends of stdin, stdout and stderr."""
    (stdin_read, stdin), (stdout, stdout_write), (stderr, stderr_write) = os.pipe(), os.pipe(), os.pipe()
    try:
        yield [stdin_read, stdout_write, stderr_write], stdin, stdout, stderr
    finally:
        os.close(stdout)
        os.close(stderr)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
