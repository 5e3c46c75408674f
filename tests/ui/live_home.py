"""A home with one real training run in progress, and a server of its live page."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

SCRIPT = str(Path(sys.executable).with_name("perilune"))
TASKS = Path(__file__).parents[1] / "tasks"
RECIPE = """\
name: alive
model: {preset: tiny}
environment: {id: factory, factory: "task_environments:Digits"}
resources: {device: cpu, threads: 1}
stages:
  - {name: rl, task: rl, checkpoint: model, steps: 40000, prompts: 4, samples: 4, max_tokens: 4, lr: 1.0e-8}
"""


@dataclass
class LiveHome:
    """A home and the `perilune run` process that trains in it."""

    root: Path
    command: subprocess.Popen[bytes]

    @property
    def attempt(self) -> Path:
        """Directory of the attempt."""
        return next(self.root.glob("runs/*/attempts/1"))

    def steps(self) -> int:
        """Number of steps in the run's metrics.jsonl."""
        metrics = next(self.root.glob("runs/*/attempts/1/artifacts/metrics.jsonl"), None)
        return metrics.read_bytes().count(b"\n") if metrics else 0

    @property
    def worker(self) -> psutil.Process:
        """The worker process. It writes heartbeats while its child runs the task."""
        return psutil.Process(json.loads((self.attempt / "runtime" / "claim.json").read_text())["pid"])

    def processes(self) -> list[psutil.Process]:
        """The command, the worker and their children; children first."""
        ours = [self.worker, psutil.Process(self.command.pid)]
        return [child for own in ours for child in own.children(recursive=True)] + ours

    def kill(self) -> None:
        """Send SIGKILL to the command, the worker and the task."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):  # it may have died with its parent
                process.kill()
        self.command.wait()


def environment(home: Path) -> dict[str, str]:
    """Environment variables for subprocesses."""
    paths = os.pathsep.join([str(TASKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PERILUNE_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 240.0) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.05)


@contextmanager
def training(folder: Path, recipe: str = RECIPE, nice: int = 10) -> Iterator[LiveHome]:
    """Start a run in a new home; kill it on exit. It yields the processor to the tests once it trains."""
    (folder / "alive.yaml").write_text(recipe)
    command = subprocess.Popen(
        [SCRIPT, "run", "alive.yaml"],
        cwd=folder,
        env=environment(folder / "home"),
        stdout=(folder / "log").open("wb"),
        stderr=subprocess.STDOUT,
    )
    made = LiveHome(folder / "home", command)
    try:
        wait_for(lambda: made.steps() > 2 or command.poll() is not None, "the first steps")
        assert command.poll() is None, (folder / "log").read_text()
        for process in made.processes():
            process.nice(nice)
        yield made
    finally:
        if command.poll() is None:
            made.kill()


@contextmanager
def pages(home: Path, *options: str, **variables: str) -> Iterator[str]:
    """Serve a home with `perilune ui`; yields the URL."""
    server = subprocess.Popen(
        [SCRIPT, "ui", "--home", str(home), "--port", "0", "--json", *options],
        env=environment(home) | variables,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        text = "".join(iter(server.stdout.readline, "}\n"))
        yield str(json.loads(text + "}")["url"])
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0  # Ctrl-C stops the server cleanly
