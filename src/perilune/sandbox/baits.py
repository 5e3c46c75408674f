"""The baits of an audit: secrets, processes and sockets for untrusted code to find, which show their use."""

from __future__ import annotations

import ctypes
import os
import platform
import secrets
import socket
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import perilune
from perilune.sandbox.seccomp import denied_calls

BAIT_VARIABLE = "PERILUNE_AUDIT_BAIT"
_CLONE = {"x86_64": 56, "aarch64": 220}


class Baits:
    """A secret in files, a variable and memory, a process to kill, and sockets to reach.

    Enter the context before the sandbox starts, so that the sandbox could inherit the baits.

    Attributes:
        secret: a random text that exists nowhere else.
        facts: where the baits are, for the probes.
    """

    def __init__(self) -> None:
        self.secret = secrets.token_hex(16)
        self.left_behind = secrets.token_hex(16)
        self.facts: dict[str, Any] = {}
        self._kept = ctypes.create_string_buffer(self.secret.encode())

    def __enter__(self) -> Baits:
        self._folder = tempfile.TemporaryDirectory(prefix="perilune-audit-")
        folder = Path(self._folder.name)
        folder.chmod(0o755)
        for name, mode in (("public", 0o644), ("private", 0o600)):
            (folder / name).write_text(self.secret)
            (folder / name).chmod(mode)
        os.environ[BAIT_VARIABLE] = self.secret
        self._descriptor = os.open(folder / "private", os.O_RDONLY)
        os.set_inheritable(self._descriptor, True)
        self._tcp = socket.create_server(("127.0.0.1", 0))
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("127.0.0.1", 0))
        self._unix, self._abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        abstract = f"perilune-audit-{self.secret[:8]}"
        for listener, address in ((self._unix, str(folder / "socket")), (self._abstract, "\0" + abstract)):
            listener.bind(address)
            listener.listen()
        self._datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._datagrams.bind(str(folder / "datagrams"))
        for name in ("socket", "datagrams"):
            (folder / name).chmod(0o777)
        self._start_victim()
        self.facts |= {
            "secret": self.secret,
            "public_file": str(folder / "public"),
            "private_file": str(folder / "private"),
            "descriptor": self._descriptor,
            "address": ctypes.addressof(self._kept),
            "owner": os.getpid(),
            "tcp": self._tcp.getsockname()[1],
            "udp": self._udp.getsockname()[1],
            "unix": str(folder / "socket"),
            "datagrams": str(folder / "datagrams"),
            "abstract": abstract,
            "home": str(Path.home()),
            "project": perilune.__file__,
            "package_root": str(Path(perilune.__file__).parents[1]),
            "packages": sysconfig.get_path("purelib"),
            "host": platform.node(),
            "left_behind": self.left_behind[::-1],
            "clone": _CLONE.get(platform.machine(), -1),
            "calls": denied_calls(),
        }
        return self

    def __exit__(self, *error: object) -> None:
        self._victim.kill()
        self._victim.wait()
        for bait in (self._tcp, self._udp, self._unix, self._abstract, self._datagrams):
            bait.close()
        os.close(self._descriptor)
        os.environ.pop(BAIT_VARIABLE, None)
        self._folder.cleanup()

    def list_taken(self) -> list[str]:
        """Return the baits that were taken since the last call, as seen from outside."""
        taken = []
        if self._victim.poll() is not None:
            taken.append("another process was killed")
            self._start_victim()
        for receiver in (self._udp, self._datagrams):
            receiver.setblocking(False)
            with suppress(BlockingIOError):
                receiver.recv(100)
                taken.append("a datagram arrived")
        return taken

    def _start_victim(self) -> None:
        self._victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.facts["victim"] = self._victim.pid
