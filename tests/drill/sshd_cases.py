"""A private sshd on a loopback port, and a TCP proxy to it that tests can cut, stall and corrupt."""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from drill_cases import wait_for

from perilune.execution.hosts.ssh import SshSettings

CONFIG = """
ListenAddress 127.0.0.1
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
MaxSessions 100
# Keeps bash from reading the user's .bashrc, which may be slow.
SetEnv SHLVL=1
LogLevel ERROR
"""


class Sshd:
    """An sshd in `folder` that accepts the key folder/key for the current user."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        if program is None:
            pytest.skip("needs sshd: apt install openssh-server")
        self.program, self.folder = program, folder
        folder.mkdir(parents=True)
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd's privilege separation directory
        self.host_key = make_key(folder / "host_key")
        (folder / "authorized_keys").write_text(make_key(folder / "key") + "\n")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.start()

    def start(self) -> None:
        """Listen with the host key that is in the folder now."""
        config = self.folder / "config"
        keys = f"HostKey {self.folder}/host_key\nAuthorizedKeysFile {self.folder}/authorized_keys\n"
        config.write_text(f"Port {self.port}\n{keys}{CONFIG}")
        with (self.folder / "log").open("ab") as log:
            command = [self.program, "-D", "-e", "-f", str(config)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        wait_for(self._listens, "sshd")

    def _listens(self) -> bool:
        assert self.process.poll() is None, (self.folder / "log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        """End sshd and its connections; remote commands continue."""
        for pid in children(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.terminate()
        self.process.wait()

    def settings(self, port: int | None = None) -> SshSettings:
        """Ssh settings for this sshd."""
        return SshSettings(
            host="127.0.0.1",
            port=port or self.port,
            user=getpass.getuser(),
            identity=str(self.folder / "key"),
            host_key=self.host_key,
            config="/dev/null",
        )


def make_key(path: Path) -> str:
    """Create a key pair at `path`; return the public half without its comment."""
    path.unlink(missing_ok=True)
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return " ".join(path.with_suffix(".pub").read_text().split()[:2])


def children(pid: int) -> list[int]:
    listing = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in listing.stdout.split()]


@contextmanager
def sshd(folder: Path) -> Iterator[Sshd]:
    running = Sshd(folder)
    try:
        yield running
    finally:
        running.stop()


class Line:
    """A TCP proxy to a port of this machine.

    Attributes:
        is_cut: new connections are closed at once.
        bend: changes data sent to the port, given the number of bytes before; None ends the connection.
    """

    def __init__(self, port: int) -> None:
        self.is_cut = False
        self.bend: Callable[[int, bytes], bytes | None] = lambda before, data: data
        self._to = port
        self._open: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Drop every connection and let no new one through."""
        self.is_cut = True
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def restore(self) -> None:
        """Let connections through again."""
        self.is_cut = False

    def close(self) -> None:
        """Close the proxy."""
        self.cut()
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                if self.is_cut:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._to))
                self._open += [near, far]
                for source, sink, there in ((near, far, True), (far, near, False)):
                    arguments = (source, sink, there)
                    threading.Thread(target=self._copy, args=arguments, daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, there: bool) -> None:
        before = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                bent = self.bend(before, data) if there else data
                if bent is None:
                    break
                sink.sendall(bent)
                before += len(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
