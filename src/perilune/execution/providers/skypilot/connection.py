"""A process of the interpreter that has SkyPilot, which answers questions in lines of JSON.

SkyPilot pins versions of packages that conflict with other software in an environment, and unpickles data
from its API server. So it is never imported into this process.
"""

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
    "pipx install 'skypilot[aws]' (or another cloud), or set its interpreter: python: /path/to/bin/python"
)


class Bridge:
    """The client of `bridge.py`, which it starts when needed and restarts after a crash.

    Args:
        python: the interpreter; by default that of the `sky` on the PATH, or this one if it has SkyPilot.
    """

    def __init__(self, python: str | None) -> None:
        self._python = python
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def ask(self, call: str, **arguments: Any) -> Any:
        """Ask a question and wait for the answer.

        Raises:
            ProviderUnreachableError: there is no answer, or the effect is unknown.
            NoCapacityError, ProviderRefusedError: nothing was created.
            RequestError: SkyPilot is not installed.
        """
        with self._lock:
            try:
                process = self._started()
                assert process.stdin is not None
                process.stdin.write(json.dumps({"call": call, **arguments}).encode() + b"\n")
                process.stdin.flush()
                answer = self._read(process)
            except RequestError:
                raise  # SkyPilot is not installed
            except (OSError, ValueError, EOFError) as error:
                why = self._end() or str(error) or type(error).__name__
                raise ProviderUnreachableError(f"no answer ({why})", where=f"SkyPilot, {call}") from None
        return unwrap(answer, call)

    def close(self) -> None:
        """End the process; the next question starts a new one."""
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            command = [find_interpreter(self._python), str(BRIDGE)]
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _end
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    start_new_session=True,  # this process handles Ctrl-C
                )
            except OSError as error:
                raise RequestError(f"cannot be started: {error}", where=command[0], remedy=REMEDY) from None
            greeting = self._read(self._process)
            if "error" in greeting:
                self._end()
                message = f"has no SkyPilot ({greeting['error']['message']})"
                raise RequestError(message, where=command[0], remedy=REMEDY)
        return self._process

    def _read(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert process.stdout is not None
        line, deadline = b"", time.monotonic() + CALL_SECONDS
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no answer in {CALL_SECONDS:.0f} s")
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                raise EOFError("the process ended")
            line += data
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> str:
        """End the process; returns the last line of its stderr."""
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
            lines = errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:500] if lines else ""


def unwrap(answer: dict[str, Any], call: str) -> Any:
    """Return the answer; raises it if it is an error."""
    if "error" not in answer:
        return answer["answer"]
    kind, message, where = answer["error"]["kind"], answer["error"]["message"], f"SkyPilot, {call}"
    if kind == "refused":
        raise ProviderRefusedError(message, where=where, remedy="sky check")
    if kind == "capacity":
        raise NoCapacityError(message, where=where)
    raise ProviderUnreachableError(message, where=where)


def find_interpreter(named: str | None) -> str:
    """Return the interpreter that has SkyPilot.

    Raises:
        RequestError: there is none.
    """
    if named is not None:
        return str(Path(named).expanduser())
    script = shutil.which("sky")
    if script is not None:  # a script installed by pip, pipx or uv names its interpreter in its first lines
        head = Path(script).read_bytes()[:1024].decode("utf-8", "replace")
        match = re.search(r"(/[^\s'\"]*python[\d.]*)", head)
        if match is not None:
            return match[1]
    if importlib.util.find_spec("sky") is not None:
        return sys.executable
    raise RequestError("SkyPilot is not installed", where="providers.yaml, python", remedy=REMEDY)
