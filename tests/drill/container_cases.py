"""Real containers: a Docker daemon of our own, and Podman, with an image that is made here out of nothing.

The image has folders and links only: what runs in it lies on this machine, and is mounted.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
    """A program with Docker's command line, and the ID of the image that it has."""

    path: Path
    image: str

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run([str(self.path), *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def container(self, *mounts: Path, **settings: object) -> Container:
        """A container in which this interpreter and the drills are found."""
        needed = {Path("/usr"), Path(sys.prefix), Path(sys.base_prefix), SOURCE, INSTALLED, *mounts}
        needed |= {Path(os.path.realpath(one)) for one in needed}
        own = sorted(str(one) for one in needed if one == Path("/usr") or not one.is_relative_to("/usr"))
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
    """A tar of the image."""
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
    """`command` as a program in `folder`, with the image in it."""
    path = folder / name
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    made = subprocess.run(
        [str(path), "import", "-", "drill"], input=image(), capture_output=True, check=False
    )
    assert made.returncode == 0, made.stderr.decode()
    found = made.stdout.decode().split()[-1].rpartition(":")[2]
    return Program(path, f"sha256:{found}")


@contextmanager
def docker(folder: Path) -> Iterator[Program]:
    """Docker, with a daemon of its own."""
    needs("dockerd", "docker.io")
    folder.mkdir(parents=True)
    socket = folder / "socket"
    command = [
        "dockerd",
        f"--data-root={folder}/data",
        f"--exec-root={folder}/run",
        f"--host=unix://{socket}",
    ]
    command += [f"--pidfile={folder}/pid", "--bridge=none", "--iptables=false"]
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(lambda: socket.exists() or daemon.poll() is not None, "dockerd")
        assert daemon.poll() is None, (folder / "log").read_text()[-3000:]
        yield program(folder, "docker", f"docker --host unix://{socket}")
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait()


@contextmanager
def podman(folder: Path) -> Iterator[Program]:
    """Podman, with a store of its own."""
    needs("podman", "podman runc")
    folder.mkdir(parents=True)
    (folder / "conf").write_text(PODMAN)
    with tempfile.TemporaryDirectory(prefix="podman") as state:  # whose path may have 50 characters at most
        places = f"--root {folder}/data --runroot {state} --storage-driver vfs"
        yield program(folder, "podman", f"env CONTAINERS_CONF={folder}/conf podman {places}")


def needs(command: str, packages: str) -> None:
    if shutil.which(command) is None or os.getuid() != 0:
        why = f"needs root and {command}: apt-get install {packages}"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
