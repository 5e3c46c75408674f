"""Real containers: a private Docker daemon, and Podman, with an image built here from scratch.

The image has only folders and links; programs are mounted from this machine.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory  # sockets' paths are short

import pytest
from drill_cases import INSTALLED, wait_for

import perilune
from perilune.execution.launchers.docker import Container

SOURCE = Path(perilune.__path__[0]).parent
FOLDERS = ("dev", "etc", "proc", "run", "sbin", "sys", "tmp", "usr", "var")
PODMAN = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
"""


@dataclass(frozen=True)
class Program:
    """A program with Docker's command line, and the ID of its image.

    Tests can make it fail: the shell code in faults/COMMAND beside it runs before COMMAND.
    """

    path: Path
    image: str

    @property
    def without_faults(self) -> Program:
        """The same program without injected faults."""
        return Program(self.path.with_name("without-faults"), self.image)

    @contextmanager
    def fault(self, command: str, line: str) -> Iterator[None]:
        """Run the shell code `line` before `command` inside the block. "$program" is the real program."""
        path = self.path.parent / "faults" / command
        path.write_text(line)
        try:
            yield
        finally:
            path.unlink()

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run([str(self.path), *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def container(self, *mounts: Path, **settings: object) -> Container:
        """Settings of a container with this interpreter and the drill task."""
        needed = {Path("/usr"), Path(sys.prefix), Path(sys.base_prefix), SOURCE, INSTALLED, *mounts}
        needed |= {Path(os.path.realpath(path)) for path in needed}
        own = sorted(str(path) for path in needed if path == Path("/usr") or not path.is_relative_to("/usr"))
        return Container.model_validate(
            {
                "program": str(self.path),
                "image": self.image,
                "python": sys.executable,
                "network": "none",
                "mounts": tuple(own),
                **settings,
            }
        )


def image() -> bytes:
    """The image as a tar archive."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name in FOLDERS:
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(member)
        for name in ("bin", "lib", "lib64"):
            if Path("/", name).is_symlink():
                member = tarfile.TarInfo(name)
                member.type, member.linkname = tarfile.SYMTYPE, str(Path("/", name).readlink())
                tar.addfile(member)
    return stream.getvalue()


def program(folder: Path, name: str, command: str) -> Program:
    """Wrap `command` as a program in `folder` and import the image."""
    path = folder / name
    (folder / "faults").mkdir()
    fault = f'program="{command}"; [ ! -e "{folder}/faults/$1" ] || . "{folder}/faults/$1"'
    path.write_text(f'#!/bin/sh\n{fault}\nexec {command} "$@"\n')
    (folder / "without-faults").write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    for file in (path, folder / "without-faults"):
        file.chmod(0o755)
    made = subprocess.run(
        [str(path), "import", "-", "drill"], input=image(), capture_output=True, check=False
    )
    assert made.returncode == 0, made.stderr.decode()
    digest = made.stdout.decode().split()[-1].rpartition(":")[2]
    return Program(path, f"sha256:{digest}")


@contextmanager
def docker(folder: Path) -> Iterator[Program]:
    """Docker with its own daemon."""
    needs("dockerd", "docker.io")
    folder.mkdir(parents=True)
    with TemporaryDirectory(prefix="docker") as state, (folder / "log").open("wb") as log:
        socket = Path(state, "socket")
        command = ["dockerd", f"--data-root={folder}/data", f"--exec-root={state}", f"--host=unix://{socket}"]
        command += [f"--pidfile={state}/pid", "--bridge=none", "--iptables=false"]
        daemon = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_for(lambda: _answers(socket) or daemon.poll() is not None, "dockerd")
            if daemon.poll() is not None:
                pytest.xfail(
                    f"this machine does not let dockerd start: {(folder / 'log').read_text()[-500:]}"
                )
            yield checked(program(folder, "docker", f"docker --host unix://{socket}"))
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait()
            subprocess.run(["umount", f"{folder}/data"], capture_output=True, check=False)  # if it died


def _answers(socket: Path) -> bool:
    command = ["docker", "--host", f"unix://{socket}", "version"]
    return socket.exists() and not subprocess.run(command, capture_output=True, check=False).returncode


@contextmanager
def podman(folder: Path) -> Iterator[Program]:
    """Podman with its own storage."""
    needs("podman", "podman runc")
    folder.mkdir(parents=True)
    (folder / "conf").write_text(PODMAN)
    with TemporaryDirectory(prefix="podman") as state:
        places = f"--root {folder}/data --runroot {state} --storage-driver vfs"
        yield checked(program(folder, "podman", f"env CONTAINERS_CONF={folder}/conf podman {places}"))


def checked(found: Program) -> Program:
    """Return the program if this machine can run containers with it; otherwise xfail."""
    where = ["run", "--rm", "--network=none", "--volume=/usr:/usr:ro", found.image]
    command = [str(found.path), *where, "/usr/bin/true"]
    first = subprocess.run(command, capture_output=True, check=False)
    if first.returncode:
        pytest.xfail(f"this machine runs no containers: {first.stderr.decode()[-500:]}")
    return found


def needs(command: str, packages: str) -> None:
    if os.getuid() != 0:
        pytest.xfail("only root may start a daemon for containers here")
    if shutil.which(command) is None:
        pytest.skip(f"needs {command}: apt-get install {packages}")
