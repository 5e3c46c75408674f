"""Machines in their own Linux namespaces, with links that tests can cut and slow down.

    here ── near ── jump ── far ── box        jump is the only way to box

A machine's first process ends when our pipe closes. The kernel then ends the machine's processes, its network
and its end of every link. So nothing outlives a failed test, nor a killed test process.
"""

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from drill_cases import wait_for
from sshd_cases import CONFIG, make_key

from perilune.execution.hosts.ssh import SshSettings

# A machine's first process: the kernel reaps its children, and it ends with its input.
FIRST = 'trap "" CHLD && hostname "$0" && ip link set lo up && echo up && exec cat'
JUMP, BOX = "10.77.1.2", "10.77.2.1"
USER_CONFIG = f"""
Host box
  HostName {BOX}
  ProxyJump jump
Host jump
  HostName {JUMP}
Host *
  User {{user}}
  IdentityFile {{folder}}/key
  IdentitiesOnly yes
  UserKnownHostsFile {{folder}}/known_hosts
  StrictHostKeyChecking yes
  ConnectTimeout 2
  ServerAliveInterval 1
  ServerAliveCountMax 1
"""


class Machine:
    """A machine with its own network, processes, mounts and host name; the files are this machine's."""

    def __init__(self, name: str) -> None:
        self.name = name
        own = ["unshare", "--net", "--pid", "--mount-proc", "--uts", "--fork", "--kill-child"]
        self._power = subprocess.Popen(
            [*own, "sh", "-c", FIRST, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._power.stdout is not None
        if os.getuid() != 0 or self._power.stdout.readline() != "up\n":
            self._power.communicate("")
            pytest.xfail("needs root, and a kernel that lends it namespaces")
        (self.first,) = (child.pid for child in psutil.Process(self._power.pid).children())
        self.network = network_of(self.first)

    def inside(self, *namespaces: str) -> list[str]:
        """The prefix of a command that runs on the machine."""
        return ["nsenter", "--target", str(self.first), *namespaces]

    def run(self, *command: str) -> None:
        """Run a command in the machine's network."""
        subprocess.run([*self.inside("--net"), *command], check=True)

    def processes(self) -> list[psutil.Process]:
        """All processes in its network, including ssh clients that only use its network."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if network_of(process.pid) == self.network:
                    found.append(process)
        return found

    def end(self) -> None:
        """Power the machine off."""
        self._power.communicate("")
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        wait_for(lambda: not self.processes(), f"the end of {self.name}")


def network_of(pid: int) -> Path:
    """The network namespace of a process."""
    return Path(f"/proc/{pid}/ns/net").readlink()


class Server(Machine):
    """A machine with an sshd after `serve`; its keys are in folder/name."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name)
        self.folder = folder / name
        self.folder.mkdir()
        self._log = self.folder / "log"
        self.host_keys = {name: make_key(self.folder / name) for name in ("own", "other")}

    def serve(self, address: str, authorized: Path) -> None:
        """Start sshd; it accepts the key whose public half is `authorized`."""
        program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        assert program is not None, "needs sshd: apt install openssh-server"
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd's privilege separation directory
        shutil.copy(self.folder / "own", self.folder / "host_key")
        keys = f"HostKey {self.folder}/host_key\nAuthorizedKeysFile {authorized}\n"
        config = self.folder / "config"
        config.write_text(f"Port 22\nListenAddress {address}\nLogLevel INFO\n{keys}{CONFIG}")
        own = self.inside("--net", "--pid", "--mount", "--uts")
        subprocess.run([*own, program, "-E", str(self._log), "-f", str(config)], check=True)
        wait_for(lambda: self._record_event("Server listening") == 2, "sshd")  # also on the loopback
        children = psutil.Process(self.first).children()
        (self._sshd,) = (child for child in children if child.name() == "sshd")

    def connections(self) -> int:
        """The number of accepted connections so far."""
        return self._record_event("Accepted publickey")

    def cut_sessions(self) -> None:
        """End every connection; remote commands continue."""
        for session in self._sshd.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                session.kill()

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Show another host key inside the block, like another machine at this address; connections end."""
        self._show("other")
        try:
            yield
        finally:
            self._show("own")

    def _show(self, key: str) -> None:
        before = self._record_event("Server listening")
        shutil.copy(self.folder / key, self.folder / "host_key")
        self._sshd.send_signal(signal.SIGHUP)
        wait_for(lambda: self._record_event("Server listening") == before + 2, "the start of sshd")
        self.cut_sessions()

    def _record_event(self, words: str) -> int:
        return self._log.read_text().count(words) if self._log.exists() else 0


class Link:
    """A link between machines `one` and `other`, which have the addresses 10.77.N.1 and 10.77.N.2."""

    def __init__(self, one: Machine, other: Machine, number: int) -> None:
        self.one, self.other = one, other
        there = str(other.first)
        one.run("ip", "link", "add", other.name, "type", "veth", "peer", "name", one.name, "netns", there)
        for host, (machine, device) in enumerate(self._ends(), start=1):
            machine.run("ip", "address", "add", f"10.77.{number}.{host}/30", "dev", device)
            machine.run("ip", "link", "set", device, "up")

    def cut(self) -> None:
        """Drop all packets silently."""
        self.one.run("ip", "link", "set", self.other.name, "down")

    def restore(self) -> None:
        """Transfer packets again."""
        self.one.run("ip", "link", "set", self.other.name, "up")

    @contextmanager
    def slowed(self, rate: str) -> Iterator[None]:
        """Limit the rate in both directions inside the block."""
        shape = ["root", "tbf", "rate", rate, "burst", "8kb", "latency", "50ms"]
        try:
            for machine, device in self._ends():
                machine.run("tc", "qdisc", "replace", "dev", device, *shape)
        except subprocess.CalledProcessError:
            pytest.xfail("this kernel cannot slow a link down: it has no sch_tbf")
        try:
            yield
        finally:
            for machine, device in self._ends():
                machine.run("tc", "qdisc", "del", "dev", device, "root")

    def carried(self) -> int:
        """The number of bytes that `one` has sent so far."""
        table = Path(f"/proc/{self.one.first}/net/dev").read_text()
        (line,) = (line for line in table.splitlines() if line.strip().startswith(f"{self.other.name}:"))
        return int(line.split()[9])

    def _ends(self) -> tuple[tuple[Machine, str], tuple[Machine, str]]:
        return (self.one, self.other.name), (self.other, self.one.name)


@dataclass(frozen=True)
class Network:
    """Three machines in a row. folder/bin has an `ssh` that runs the system's ssh on the first machine."""

    folder: Path
    here: Machine
    jump: Server
    box: Server
    near: Link
    far: Link

    def settings(self) -> SshSettings:
        """Ssh settings for the box, through the user's own configuration."""
        return SshSettings(host="box", config=str(self.folder / "config"))


@contextmanager
def network(folder: Path) -> Iterator[Network]:
    """Create the machines for the block; remove every trace of them afterwards."""
    folder.mkdir()
    make_key(folder / "key")
    with ExitStack() as plugs:
        here = Machine("here")
        plugs.callback(here.end)
        jump, box = (Server(name, folder) for name in ("jump", "box"))
        plugs.callback(jump.end)
        plugs.callback(box.end)
        near, far = Link(here, jump, 1), Link(box, jump, 2)
        for server, address in ((jump, JUMP), (box, BOX)):
            server.serve(address, folder / "key.pub")
        (folder / "config").write_text(USER_CONFIG.format(user=getpass.getuser(), folder=folder))
        known = f"{JUMP} {jump.host_keys['own']}\n{BOX} {box.host_keys['own']}\n"
        (folder / "known_hosts").write_text(known)
        script = folder / "bin" / "ssh"
        script.parent.mkdir()
        script.write_text(f'#!/bin/sh\nexec {" ".join(here.inside("--net"))} {shutil.which("ssh")} "$@"\n')
        script.chmod(0o755)
        yield Network(folder, here, jump, box, near, far)
