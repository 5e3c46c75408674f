"""The way to all machines of ours on a cluster: one port on the head node, served by one of their holders.

Whichever holder has the port serves every machine; when it ends, another takes the port over. Whoever
connects says which machine, `{"machine": name, "nonce": ...}` on a line, and is shown in a frame that it is
that machine; then which command, `{"command": [...], "nonce": ..., "proof": ...}`, and then come frames. The
proofs are made with the machine's token, which is never sent. Neither side unpickles what comes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import Any, BinaryIO

import ray

from .frames import BLOCK, Kind, frame, read_frame

PAUSE = 0.5  # seconds between two attempts to have the port
LONGEST = 1 << 20  # bytes of a request
PATIENCE = 30.0  # seconds for the request to come


def serve(host: str, port: int, namespace: str) -> None:
    """Serve the port as soon as no other holder does; never returns."""
    while True:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, port))
                listener.listen(64)
            except OSError:
                time.sleep(PAUSE)
                continue
            while True:
                wire, _ = listener.accept()
                threading.Thread(target=answer, args=(wire, namespace), daemon=True).start()


def answer(wire: socket.socket, namespace: str) -> None:
    """Serve one connection to its end."""
    with wire, wire.makefile("rb") as requests, contextlib.suppress(OSError):  # whoever asked may go
        wire.settimeout(PATIENCE)
        try:
            hello = json.loads(requests.readline(LONGEST))
            machine: Any = ray.get_actor(str(hello["machine"]), namespace)
            shown = ray.get(machine.greet.remote(str(hello["nonce"])))
            wire.sendall(frame(Kind.HELLO, json.dumps(shown).encode()))
            if request := requests.readline(LONGEST):
                wire.settimeout(None)
                carry(wire, requests, machine, json.loads(request))
        except Exception as error:  # of Ray, or of the machine: only the asker can judge it
            said = (str(error).strip().splitlines() or [""])[-1]
            wire.sendall(frame(Kind.ERRORS, f"\n{type(error).__name__}: {said}\n".encode()))
        wire.shutdown(socket.SHUT_WR)
        while requests.read(BLOCK):  # else what was sent last is lost with what was not read
            pass


def carry(wire: socket.socket, requests: BinaryIO, machine: Any, asked: dict[str, Any]) -> None:
    """Run one command on a machine, and carry its bytes; returns when it has ended.

    Raises:
        OSError: when the asker is gone.
        Exception: whatever Ray raises when the machine cannot be reached.
    """
    name = ray.get(machine.open.remote(asked["command"], asked["nonce"], asked["proof"]))
    feeder = threading.Thread(target=feed, args=(requests, machine, name), daemon=True)
    feeder.start()
    try:
        code = None
        while code is None:
            output, errors, code = ray.get(machine.read.remote(name))
            for kind, data in ((Kind.OUTPUT, output), (Kind.ERRORS, errors)):
                for begin in range(0, len(data), BLOCK):
                    wire.sendall(frame(kind, data[begin : begin + BLOCK]))
        wire.sendall(frame(Kind.EXIT, json.dumps({"exit_code": code}).encode()))
    finally:
        machine.close.remote(name)
        with contextlib.suppress(OSError):
            wire.shutdown(socket.SHUT_WR)
        feeder.join()


def feed(requests: BinaryIO, machine: Any, name: str) -> None:
    """Give the command what comes for it, no faster than it takes it; when it is gone, read on."""
    with contextlib.suppress(OSError, ValueError):
        while received := read_frame(requests):
            kind, data = received
            with contextlib.suppress(ray.exceptions.RayError):
                while data:
                    data = data[ray.get(machine.write.remote(name, data)) :]
                if kind is Kind.INPUT_END:
                    machine.end_input.remote(name)
