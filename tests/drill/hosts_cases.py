"""This machine as a remote host with a connection that tests can cut, and an interpreter for it."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from drill_cases import INSTALLED

import perilune
from perilune.execution.hosts.protocol import Answer, HostRefusedError, HostUnreachableError
from perilune.execution.limits import AttemptLimits
from perilune.execution.placements.remote import RemotePlacement, Site


class NearbyHost:
    """Runs commands here. `cut` decides for each verb whether the connection drops "before" or "after" it.

    Attributes:
        calls: the verbs called so far.
        bend: changes the data sent to the host.
        within: prefix of every command, such as `unshare`.
    """

    name = "nearby"

    def __init__(self, within: Sequence[str] = ()) -> None:
        self.within = list(within)
        self.calls: list[str] = []
        self.cut: Callable[[str], str] = lambda verb: ""
        self.refuses = False
        self.bend: Callable[[bytes], bytes] = lambda data: data

    def run(
        self,
        command: Sequence[str],
        *,
        source: BinaryIO | None = None,
        sink: BinaryIO | None = None,
        timeout: float = 60.0,
    ) -> Answer:
        verb = command[5]
        self.calls.append(verb)
        if self.refuses:
            raise HostRefusedError("it has another host key")
        when = self.cut(verb)
        if when == "before":
            raise HostUnreachableError("the line is cut")
        data = self.bend(source.read()) if source is not None else b""
        with tempfile.TemporaryFile() as out:
            done = subprocess.run(
                [*self.within, *command],
                input=data,
                stdout=sink or out,
                stderr=subprocess.PIPE,
                timeout=timeout,
                check=False,
            )
            out.seek(0)
            answer = Answer(done.returncode, out.read(), done.stderr.decode())
        if when == "after":
            raise HostUnreachableError("the line is cut")
        return answer


def interpreter(folder: Path, grace: float | None = None) -> Path:
    """A Python "installed" at `folder` with the current perilune and the drill task.

    With `grace`, its `perilune worker` gives a task this many seconds to stop instead of ten.
    """
    programs = folder / "bin"
    if programs.is_dir():
        return programs / "python"
    programs.mkdir(parents=True)
    paths = f"{INSTALLED}{os.pathsep}{Path(perilune.__path__[0]).parent}"
    run = f"PYTHONPATH={paths} OMP_NUM_THREADS=1 exec {sys.executable}"
    impatient = f'shift; {run} -m perilune.execution.worker --grace {grace} "$@"\n'
    scripts = {"python": f'{run} "$@"\n', "perilune": f'{run} -m perilune.cli.main "$@"\n'}
    for name, text in (scripts if grace is None else scripts | {"perilune": impatient}).items():
        script = programs / name
        script.write_text(f"#!/bin/sh\n{text}")
        script.chmod(0o755)
    return programs / "python"


def nearby(
    folder: Path, host: NearbyHost | None = None, limits: AttemptLimits | None = None
) -> RemotePlacement:
    """A remote placement on this machine through `host`, with its workspace in `folder`."""
    python = interpreter(folder / "python")
    site = Site(python=str(python), installed=True, workspace=str(folder / "workspace"))
    return RemotePlacement(host or NearbyHost(), site, limits or AttemptLimits())
