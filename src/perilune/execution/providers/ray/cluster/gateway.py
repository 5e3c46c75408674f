"""The gateway to all machines of Perilune on a cluster: one port on the head node, served by one holder.

The holder that has the port serves every machine; when it ends, another takes over. A client names the
machine in a JSON line, `{"machine": name, "nonce": ...}`, and gets a frame that proves the machine's
identity. It then sends the command, `{"command": [...], "nonce": ..., "proof": ...}`, followed by frames.
Proofs are made with the machine's token, which is never sent. Neither side unpickles data.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import Any, BinaryIO

import ray

from .frames import BLOCK_BYTES, Kind, encode_frame, read_frame

PAUSE = 0.5  # seconds between two tries to bind the port
MAX_REQUEST_BYTES = 1 << 20
SILENT_TIMEOUT_S = 30.0  # seconds to wait for the request


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
                try:
                    wire, _ = listener.accept()
                except OSError:  # too many connections, or the client is gone
                    time.sleep(PAUSE)
                    continue
                threading.Thread(target=serve_connection, args=(wire, namespace), daemon=True).start()


def serve_connection(wire: socket.socket, namespace: str) -> None:
    with wire, wire.makefile("rb") as requests, contextlib.suppress(OSError):  # the client may be gone
        wire.settimeout(SILENT_TIMEOUT_S)
        try:
            hello = json.loads(requests.readline(MAX_REQUEST_BYTES))
            machine: Any = ray.get_actor(str(hello["machine"]), namespace)
            greeting = ray.get(machine.greet.remote(str(hello["nonce"])))
            wire.sendall(encode_frame(Kind.HELLO, json.dumps(greeting).encode()))
            if request := requests.readline(MAX_REQUEST_BYTES):
                wire.settimeout(None)
                run_command(wire, requests, machine, json.loads(request))
        except Exception as error:  # of Ray or of the machine; the client handles it
            last = (str(error).strip().splitlines() or [""])[-1]
            wire.sendall(encode_frame(Kind.ERRORS, f"\n{type(error).__name__}: {last}\n".encode()))
        wire.shutdown(socket.SHUT_WR)
        while requests.read(BLOCK_BYTES):  # closing with unread input would discard the last output
            pass


def run_command(wire: socket.socket, requests: BinaryIO, machine: Any, asked: dict[str, Any]) -> None:
    """Run one command on a machine and transfer its data; returns when it has ended.

    Raises:
        OSError: the client is gone.
        Exception: Ray cannot reach the machine.
    """
    name = ray.get(machine.open.remote(asked["command"], asked["nonce"], asked["proof"]))
    feeder = threading.Thread(target=feed_input, args=(requests, machine, name), daemon=True)
    feeder.start()
    try:
        code = None
        while code is None:
            output, errors, code = ray.get(machine.read.remote(name))
            for kind, data in ((Kind.OUTPUT, output), (Kind.ERRORS, errors)):
                for begin in range(0, len(data), BLOCK_BYTES):
                    wire.sendall(encode_frame(kind, data[begin : begin + BLOCK_BYTES]))
        wire.sendall(encode_frame(Kind.EXIT, json.dumps({"exit_code": code}).encode()))
    finally:
        machine.close.remote(name)
        with contextlib.suppress(OSError):
            wire.shutdown(socket.SHUT_WR)
        feeder.join()


def feed_input(requests: BinaryIO, machine: Any, name: str) -> None:
    """Send a command its input at the rate it accepts; once it is gone, discard the input."""
    with contextlib.suppress(OSError, ValueError):
        while received := read_frame(requests):
            kind, data = received
            with contextlib.suppress(ray.exceptions.RayError):
                while data:
                    data = data[ray.get(machine.write.remote(name, data)) :]
                if kind is Kind.INPUT_END:
                    machine.end_input.remote(name)
