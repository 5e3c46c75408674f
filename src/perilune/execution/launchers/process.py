"""Launcher `process`: the worker is a plain process of this Python."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

NAME = "process"


def worker_command(bundle: Path, epoch: int) -> list[str]:
    """Return the command that runs `bundle` as attempt `epoch`."""
    return [sys.executable, "-m", "perilune.execution.worker", str(bundle), "--epoch", str(epoch)]


def start_detached(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process in its own session, so that it outlives this one; append its output to `log`."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=environment,
        )
