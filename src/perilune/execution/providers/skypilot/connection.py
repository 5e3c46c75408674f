"""A process of the interpreter that has SkyPilot, asked in lines of JSON.

SkyPilot pins versions of packages that other software in the same environment needs otherwise, and unpickles
what its API server sends. So it is never imported here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

from perilune.errors import RequestError
from perilune.execution.providers.protocol import (
    NoCapacityError,
    ProviderRefusedError,
    ProviderUnreachableError,
)

BRIDGE = Path(__file__).with_name("bridge.py")
CALL_SECONDS = 180.0  # the first call may start SkyPilot's API server, and a look asks every cloud
REMEDY = (
    "pipx install 'skypilot[aws]' (or another cloud), or name its interpreter: python: /path/to/bin/python"
)


class Bridge:
    """The other end of `bridge.py`; started when it is needed, and again when it has died.

    Args:
        python: the interpreter; by default that of the `sky` on the PATH, else this one if it has SkyPilot.
    """

    def __init__(self, python: str | None) -> None:
        self._python = python
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self.version = ""

    def ask(self, call: str, **arguments: Any) -> Any:
        """Ask one question and wait for the answer.

        Raises:
            ProviderUnreachableError: no answer, or one that tells nothing of the effect.
            NoCapacityError, ProviderRefusedError: nothing was made.
            RequestError: SkyPilot is not there.
        """
        with self._lock:
            try:
                process = self._started()
                assert process.stdin is not None
                process.stdin.write(json.dumps({"call": call, **arguments}).encode() + b"\n")
                process.stdin.flush()
                answer = self._read(process)
            except RequestError:
                raise  # SkyPilot is not there
            except (OSError, ValueError, EOFError) as error:
                why = self._end() or str(error) or type(error).__name__
                raise ProviderUnreachableError(f"no answer ({why})", where=f"SkyPilot, {call}") from None
        return unwrap(answer, call)

    def close(self) -> None:
        """End the process; the next question starts another."""
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            command = [interpreter(self._python), str(BRIDGE)]
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _end
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    start_new_session=True,  # Ctrl-C is ours to judge
                )
            except OSError as error:
                raise RequestError(f"cannot be run: {error}", where=command[0], remedy=REMEDY) from None
            greeting = self._read(self._process)
            if "error" in greeting:
                self._end()
                raise RequestError(
                    f"has no SkyPilot ({greeting['error']['said']})", where=command[0], remedy=REMEDY
                )
            self.version = greeting["answer"]
        return self._process

    def _read(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert process.stdout is not None
        line, deadline = b"", time.monotonic() + CALL_SECONDS
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"nothing came in {CALL_SECONDS:.0f} s")
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                raise EOFError("it ended")
            line += data
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> str:
        """End the process; the last it said on stderr."""
        process, errors = self._process, self._errors
        self._process = self._errors = None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    stream.close()  # type: ignore[union-attr]
        if errors is None:
            return ""
        with errors:
            errors.seek(0)
            said = errors.read().decode("utf-8", "replace").strip().splitlines()
        return said[-1][:500] if said else ""


def unwrap(answer: dict[str, Any], call: str) -> Any:
    """What was answered, or the error that it is."""
    if "error" not in answer:
        return answer["answer"]
    kind, said, where = answer["error"]["kind"], answer["error"]["said"], f"SkyPilot, {call}"
    if kind == "refused":
        raise ProviderRefusedError(said, where=where, remedy="sky check")
    if kind == "capacity":
        raise NoCapacityError(said, where=where)
    raise ProviderUnreachableError(said, where=where)


def interpreter(named: str | None) -> str:
    """The interpreter that has SkyPilot.

    Raises:
        RequestError: there is none.
    """
    if named is not None:
        return str(Path(named).expanduser())
    script = shutil.which("sky")
    if script is not None:  # a script that pip, pipx or uv wrote names its interpreter in its first lines
        head = Path(script).read_bytes()[:1024].decode("utf-8", "replace")
        found = re.search(r"(/[^\s'\"]*python[\d.]*)", head)
        if found is not None:
            return found[1]
    if importlib.util.find_spec("sky") is not None:
        return sys.executable
    raise RequestError("there is no SkyPilot here", where="providers.yaml, python", remedy=REMEDY)
