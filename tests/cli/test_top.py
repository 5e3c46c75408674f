"""`perilune top` in a pseudo-terminal: its table and Ctrl-C."""

import contextlib
import io
import json
import os
import pty
import re
import select
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "drill"))

from drill_cases import Command, drill_plan, has_event, only_run, start, wait_for
from drill_fixtures import *  # noqa: F403

from perilune.cli.inspect.run_table import COLUMNS, live_stages, make_live_table
from perilune.control.runs.experiments import Control
from perilune.control.runs.requests import request_cancel

PATIENCE = 150.0


def start_hanging_run(control: Control) -> str:
    """Start a run that hangs after two of its five steps; returns its id."""
    _, attempt = start(control, drill_plan("one", steps=5, fail_at=2, how="hang", say="hello there"))
    wait_for(lambda: has_event(attempt, "hangs"), "the hang")
    return only_run(control).id


class Terminal:
    """`perilune top` in a pseudo-terminal of 80 columns."""

    def __init__(self) -> None:
        self.shown = ""
        self.pid, self.side = pty.fork()
        if self.pid == 0:
            os.environ |= {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "40"}
            os.execv(sys.executable, [sys.executable, "-m", "perilune.cli.main", "top", "--every", "0.2"])

    def wait_for(self, text: str) -> None:
        until = time.monotonic() + PATIENCE
        while text not in self.shown:
            assert time.monotonic() < until, self.shown[-3000:]
            if select.select([self.side], [], [], 0.2)[0]:
                self.shown += os.read(self.side, 1 << 16).decode(errors="replace")

    def interrupt(self) -> int:
        """Press Ctrl-C; returns the exit code."""
        os.write(self.side, b"\x03")
        with contextlib.suppress(OSError):  # the terminal ends with the process
            while data := os.read(self.side, 1 << 16):
                self.shown += data.decode(errors="replace")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_top_follows_runs_at_80_columns_until_interrupted(control: Control) -> None:
    run = start_hanging_run(control)
    terminal = Terminal()
    terminal.wait_for("/5")
    request_cancel(control, run)
    terminal.wait_for("cancelled")
    assert terminal.interrupt() == 0
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.shown))
    progress = re.compile(r"  one +active +1 +━+─+ [12]/5 .*  \d+:\d\d *")
    assert any(map(progress.fullmatch, lines)) and max(map(len, lines)) <= 80, lines
    assert control.run(run).state == "cancelled"


def test_top_prints_text_without_a_terminal(perilune: Command, control: Control) -> None:
    run = start_hanging_run(control)
    code, out, _ = perilune("top")
    head, line = out.splitlines()
    assert code == 0 and head.split("\t") == list(COLUMNS)
    cells = dict(zip(COLUMNS, line.split("\t"), strict=True))
    assert (cells["stage"], cells["state"], cells["run"]) == ("one", "active", run)
    assert cells["progress"].endswith("/5")
    (document,) = json.loads(perilune("top", "--json")[1])["runs"]
    done = document["progress"]["done"]  # progress is written for some steps only
    assert done in {1, 2} and document["elapsed"] > 0
    (row,) = live_stages(control, 10)
    narrow = Console(width=60, file=io.StringIO(), record=True)
    narrow.print(make_live_table([row], narrow.width))
    assert "  one, active, try 1, ━" in narrow.export_text()
    began = document["progress"]["began"]
    assert began["done"] == 1 and began["time"] <= document["progress"]["time"]
    # The time in the queue and the steps of earlier attempts do not count.
    resumed = {"done": 30, "total": 50, "unit": "steps", "figures": {}, "time": 1020.0}
    resumed["began"] = {"done": 20, "time": 1000.0}
    assert replace(row, progress=resumed, seconds=5000.0).cells()[5] == "0:40"
    assert replace(row, progress=resumed | {"began": {"done": 30, "time": 1020.0}}).cells()[5] == ""
    assert perilune("cancel", run)[0] == 0


def test_top_without_runs_prints_the_header(perilune: Command) -> None:
    assert perilune("top")[1].split() == list(COLUMNS)


@pytest.mark.parametrize("given", ["--every=0", "--last=0"])
def test_top_refuses_zero_intervals_and_counts(perilune: Command, given: str) -> None:
    assert perilune("top", given)[0] == 2
