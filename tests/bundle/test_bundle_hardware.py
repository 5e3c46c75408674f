"""The hardware sampler: measurements of the machine and of a process tree."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perilune.execution.hardware import HardwareSampler

MEBIBYTE = 1 << 20


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_sampler_writes_one_line_per_interval(tmp_path: Path) -> None:
    with HardwareSampler(tmp_path / "h.jsonl", os.getpid(), interval=0.05):
        time.sleep(1.0)
    rows = read_rows(tmp_path / "h.jsonl")
    assert 3 <= len(rows) <= 22
    times = [row["time"] for row in rows]
    assert times == sorted(times)


def test_sampler_measures_plausible_values(tmp_path: Path) -> None:
    with HardwareSampler(tmp_path / "h.jsonl", os.getpid(), interval=0.1):
        started = time.monotonic()
        while time.monotonic() - started < 0.5:
            pass
    row = read_rows(tmp_path / "h.jsonl")[-1]
    assert 0 <= row["cpu_percent"] <= 100
    assert 0 < row["memory_used"] < row["memory_total"]
    assert len(row["load"]) == 3
    assert row["disk_free"] > 0
    assert max(row["tree"]["cpu_percent"] for row in read_rows(tmp_path / "h.jsonl")) > 10


def test_sampler_counts_child_processes_until_exit(tmp_path: Path) -> None:
    """A grandchild process holds 50 MiB, as the scorer's process below a task does."""
    hold = "b = bytearray(50 << 20); b[::4096] = b'1' * len(b[::4096]); print(flush=True); input()"
    nest = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    nest = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {nest!r}])"
    child = subprocess.Popen([sys.executable, "-c", nest], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    child.stdout.readline()
    sampler = HardwareSampler(tmp_path / "h.jsonl", child.pid)
    tree = sampler.sample()["tree"]
    assert tree["processes"] == 3
    assert tree["rss"] == sum(tree["rss_by_pid"].values()) > 50 * MEBIBYTE
    child.stdin.write(b"\n")
    child.stdin.close()
    child.wait()
    child.stdout.close()
    assert sampler.sample()["tree"] == {"processes": 0, "rss": 0, "cpu_percent": 0.0, "rss_by_pid": {}}


def test_sampler_stops_and_keeps_error_when_file_is_not_writable(tmp_path: Path) -> None:
    with HardwareSampler(tmp_path / "absent" / "h.jsonl", os.getpid(), interval=0.01) as sampler:
        wait_for(lambda: sampler.error is not None)
    assert isinstance(sampler.error, FileNotFoundError)


def test_sampler_appends_to_existing_file(tmp_path: Path) -> None:
    for _ in range(2):
        with HardwareSampler(tmp_path / "h.jsonl", interval=10):
            pass
    assert len(read_rows(tmp_path / "h.jsonl")) == 2
