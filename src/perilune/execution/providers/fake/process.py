"""Start and stop the fake cloud's server."""

import json
import platform
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from perilune.errors import RequestError, WorkFailedError
from perilune.execution.launchers.process import start_detached
from perilune.execution.processes import POLL_SECONDS
from perilune.execution.providers.fake.server import ADDRESS, CAPACITY
from perilune.execution.providers.fake.weather import Weather
from perilune.files import read_json

START_SECONDS = 30.0
SERVER = "perilune.execution.providers.fake.server"


def start(
    folder: Path, weather: Weather, *, capacity: int = CAPACITY, tied: bool = True
) -> subprocess.Popen[bytes]:
    """Start the cloud in `folder`, and wait until it answers.

    Args:
        tied: whether it ends with this process.

    Raises:
        RequestError: this is not Linux, whose process tree the machines need.
        WorkFailedError: the server does not come up.
    """
    if platform.system() != "Linux":
        raise RequestError("the fake cloud needs Linux", remedy="run it in a Linux virtual machine")
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--weather", json.dumps(asdict(weather)), "--capacity", str(capacity), *["--tied"] * tied]
    process = start_detached([sys.executable, "-m", SERVER, str(folder), *options], folder / "server.log")
    deadline = time.monotonic() + START_SECONDS
    while _served_by(folder) != process.pid:
        if process.poll() is not None or time.monotonic() > deadline:
            log_end = (folder / "server.log").read_text().strip()[-500:]
            raise WorkFailedError(f"the fake cloud did not come up: {log_end}", where=str(folder))
        time.sleep(POLL_SECONDS)
    return process


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kill the cloud's server. Its machines continue to run."""
    process.send_signal(signal.SIGKILL)
    process.wait()


def _served_by(folder: Path) -> int | None:
    try:
        return int(read_json(folder / ADDRESS)["pid"])
    except RequestError:
        return None
