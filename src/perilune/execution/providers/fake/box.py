"""The first process of a fake machine: starts what is asked for, and parents all that is left behind.

Run as a script, with the standard library alone. Everything that ever runs on the machine descends from it
(it is a subreaper), so that ending the machine is ending its descendants. It outlives the cloud's server.

Over its socket comes one message a command: JSON `{"command": [...]}` with three file descriptors, which
become stdin, stdout and stderr; back goes JSON `{"exit_code": n}`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

SOCKET = "box.sock"
LONGEST = 1 << 20  # bytes of a command
PR_SET_CHILD_SUBREAPER = 36


class Box:
    """Starts commands, and waits for every child there is, adopted ones too."""

    def __init__(self) -> None:
        self._waiting: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self._born = threading.Event()

    def serve(self, listener: socket.socket) -> None:
        threading.Thread(target=self._reap, daemon=True).start()
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._start, args=(connection,), daemon=True).start()

    def _start(self, connection: socket.socket) -> None:
        message, descriptors, _, _ = socket.recv_fds(connection, LONGEST, 3)
        if len(descriptors) != 3:
            connection.close()
            return
        try:
            command = json.loads(message)["command"]
            with self._lock:  # so that it is known before it can be reaped
                stdin, stdout, stderr = descriptors
                child = subprocess.Popen(
                    command, stdin=stdin, stdout=stdout, stderr=stderr, cwd="home", start_new_session=True
                )
                child.returncode = 0  # waiting is not its business
                self._waiting[child.pid] = connection
            self._born.set()
        except (OSError, ValueError) as error:
            os.write(descriptors[2], f"{error}\n".encode())
            answer(connection, 127)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                self._born.wait()
                self._born.clear()
                continue
            with self._lock:
                connection = self._waiting.pop(pid, None)
            if connection is not None:
                code = os.waitstatus_to_exitcode(status)
                answer(connection, 128 - code if code < 0 else code)


def answer(connection: socket.socket, exit_code: int) -> None:
    with contextlib.suppress(OSError), connection:  # whoever asked may be gone
        connection.sendall(json.dumps({"exit_code": exit_code}).encode())


def main() -> None:
    """`python box.py FOLDER`: serve on FOLDER/box.sock."""
    os.chdir(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f".{SOCKET}")
    listener.listen(64)
    Path(f".{SOCKET}").rename(SOCKET)  # being there, it answers
    Box().serve(listener)


if __name__ == "__main__":
    main()
