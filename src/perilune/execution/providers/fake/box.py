"""The first process of a fake machine: runs commands, and adopts their orphans.

It runs as a script with only the standard library. Everything on the machine descends from it (it is a
subreaper), so terminating the machine means killing its descendants. It outlives the cloud's server.

Each command is one message over its socket: JSON `{"command": [...]}` with three file descriptors for stdin,
stdout and stderr. The answer is JSON `{"exit_code": n}`.
"""

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
MAX_COMMAND_BYTES = 1 << 20
PR_SET_CHILD_SUBREAPER = 36


class Box:
    """Runs commands, and waits for every child, including adopted ones."""

    def __init__(self) -> None:
        self._waiting: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self._child_started = threading.Event()

    def serve(self, listener: socket.socket) -> None:
        threading.Thread(target=self._reap, daemon=True).start()
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._start, args=(connection,), daemon=True).start()

    def _start(self, connection: socket.socket) -> None:
        message, descriptors, _, _ = socket.recv_fds(connection, MAX_COMMAND_BYTES, 3)
        if len(descriptors) != 3:
            connection.close()
            return
        try:
            command = json.loads(message)["command"]
            with self._lock:  # so that the child is registered before it can be reaped
                stdin, stdout, stderr = descriptors
                child = subprocess.Popen(
                    command, stdin=stdin, stdout=stdout, stderr=stderr, cwd="home", start_new_session=True
                )
                child.returncode = 0  # `_reap` waits for it
                self._waiting[child.pid] = connection
            self._child_started.set()
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
                self._child_started.wait()
                self._child_started.clear()
                continue
            with self._lock:
                connection = self._waiting.pop(pid, None)
            if connection is not None:
                code = os.waitstatus_to_exitcode(status)
                answer(connection, 128 - code if code < 0 else code)


def answer(connection: socket.socket, exit_code: int) -> None:
    with contextlib.suppress(OSError), connection:  # the client may be gone
        connection.sendall(json.dumps({"exit_code": exit_code}).encode())


def main() -> None:
    """`python box.py FOLDER`: serve on FOLDER/box.sock."""
    os.chdir(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f".{SOCKET}")
    listener.listen(64)
    Path(f".{SOCKET}").rename(SOCKET)  # once the socket exists, it answers
    Box().serve(listener)


if __name__ == "__main__":
    main()
