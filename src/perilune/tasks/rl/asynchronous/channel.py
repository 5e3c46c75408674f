"""Messages between the learner and a rollout process: JSON lines, and the files that they name.

A message names a file without its folder. Each side has a folder for files; on one machine both use the same
folder.
"""

import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

PROCESS_MODULE = "perilune.tasks.rl.asynchronous.process"
FILE_KEYS = ("weights", "file", "snapshot")  # keys of a message that name a file

Message = Mapping[str, Any]


class Channel(ABC):
    """The learner's end of the connection to one rollout process."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send a message and the file of weights that it names. Do nothing if the process has ended."""

    @abstractmethod
    def messages(self) -> Iterator[Message]:
        """Iterate over the messages of the process until it ends, each with its file in place."""

    @abstractmethod
    def close(self) -> str:
        """End the process if it still runs, and return how it ended, such as "exit code -9"."""


class LocalChannel(Channel):
    """The connection to a process on this machine, over its standard input and output.

    Args:
        bundle: the stage's bundle.
        folder: the folder for files, which both sides use.
    """

    def __init__(self, bundle: Path, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", PROCESS_MODULE, str(bundle), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def send(self, message: Message) -> None:
        self.send_line(json.dumps(message).encode())

    def send_line(self, line: bytes) -> None:
        """Send a message as JSON."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def messages(self) -> Iterator[Message]:
        return map(json.loads, self.lines())

    def lines(self) -> Iterator[bytes]:
        """Iterate over the messages as JSON."""
        assert self._process.stdout is not None
        return iter(self._process.stdout)

    def close(self) -> str:
        self._process.kill()
        return f"exit code {self._process.wait()}"
