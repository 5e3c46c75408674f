"""Measure the delay until the output of a remote task arrives at home, where `perilune logs -f` shows it.

    python benchmarks/follow_latency.py [--lines 60]

The control plane carries a real run, as for `perilune run`, over a private sshd on the loopback interface. A
thread reads the lengths of the remote and the local log every five milliseconds. The latency of a line is the
time between its arrival in the two logs. Writes results/follow_latency.json.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "follow_latency.json"
SECONDS = 0.25  # between two printed lines
ABOUT = (
    "The task prints a line every quarter of a second. A real `sshd` runs on the loopback interface, so real"
    " machines add the latency of the network. The delay ends when the line is in the local log, which"
    " `perilune logs -f` and the report read. Perilune promises a delay of at most two seconds."
)


class Watcher(threading.Thread):
    """Records the time at which each line of a log arrives."""

    def __init__(self, folder: Path, pattern: str) -> None:
        super().__init__(daemon=True)
        self.folder, self.pattern, self.over = folder, pattern, threading.Event()
        self.seen: list[float] = []

    def run(self) -> None:
        while not self.over.wait(0.005):
            logs = list(self.folder.glob(self.pattern))
            if logs:
                lines = logs[0].read_bytes().count(b"\n")
                self.seen += [time.monotonic()] * (lines - len(self.seen))


def latencies(lines: int) -> list[float]:
    """Seconds from the remote to the local log, for each line."""
    sys.path.insert(0, str(ROOT / "tests" / "drill"))
    from hosts_cases import interpreter
    from sshd_cases import sshd

    from perilune.bundle.job import Job, Resources
    from perilune.control.record.home import Home
    from perilune.control.runs.experiments import Control, StagePlan, advance, register_experiment
    from perilune.control.runs.progress import StageFinished
    from perilune.control.runs.templates import SshTarget, Template
    from perilune.execution.placements.remote import Site

    with tempfile.TemporaryDirectory() as name, sshd(Path(name) / "sshd") as server:
        folder = Path(name)
        site = Site(
            python=str(interpreter(folder / "python")), installed=True, workspace=str(folder / "there")
        )
        host = SshTarget(name="ssh", site=site, **server.settings().model_dump())
        job = Job(
            task="rehearse", stage="rehearse", spec={"steps": lines, "step_seconds": SECONDS}, model={},
            environment={}, seed=1, resources=Resources(device="cpu", threads=1),
        )  # fmt: skip
        control = Control(Home.open(folder / "home"))
        experiment = register_experiment(control, "latency", {"name": "latency"}, [("rehearse", "rehearse")])
        remote = Watcher(folder / "there", "*/1/runtime/runtime.log")
        local = Watcher(folder / "home" / "runs", "*/attempts/1/runtime/runtime.log")
        for watcher in (remote, local):
            watcher.start()
        plan = StagePlan("rehearse", job)
        events = list(advance(control, experiment, [plan], template=Template(placement=host)))
        assert isinstance(events[-1], StageFinished), events[-1]
        for watcher in (remote, local):
            watcher.over.set()
            watcher.join()
        control.store.close()
    count = min(len(remote.seen), len(local.seen))
    assert count >= lines, f"{count} lines of {lines} were seen"
    return [copied - written for written, copied in zip(remote.seen, local.seen, strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=60)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    delays = sorted(latencies(arguments.lines))
    from perilune.bundle.machine import describe_machine

    row: dict[str, Any] = {
        "lines": len(delays),
        "median, seconds": round(statistics.median(delays), 3),
        "95th percentile, seconds": round(delays[int(0.95 * (len(delays) - 1))], 3),
        "maximum, seconds": round(delays[-1], 3),
    }
    document = {
        "title": "Delay from a remote print to the local log",
        "about": ABOUT,
        "command": f"python benchmarks/follow_latency.py --lines {arguments.lines}",
        "latency": [row],
        "machine": describe_machine(),
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
