"""The command shows upload progress while it sends files to machines."""

import io
import time
from pathlib import Path

from perilune.cli.console import PlainLines
from perilune.cli.train.follow import upload_progress
from perilune.control.record.home import Home
from perilune.control.runs.experiments import read_progress
from perilune.files import write_json

RUN = "01RUN"


def test_upload_progress_sums_machines_of_the_newest_attempt(
    tmp_path: Path,
) -> None:
    home, out = Home.open(tmp_path), io.StringIO()
    attempt = home.attempt(RUN, 2)
    for path in (home.attempt(RUN, 1), attempt / "runtime"):
        path.mkdir(parents=True)
    for node, done in enumerate((1000, 500)):
        sent = {"done": done, "total": 2000, "unit": "bytes sent", "figures": {}}
        write_json(attempt.with_name(f"2.sent-{node}.json"), sent)
    with PlainLines(out, interval=0.0) as view, upload_progress(home, view) as begun:
        begun("sft", RUN)
        deadline = time.monotonic() + 60
        while "bytes" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "[sft] 1,500/4,000 bytes sent" in out.getvalue()
    assert read_progress(attempt) == {"done": 1500, "total": 4000, "unit": "bytes sent", "figures": {}}
    told = {"done": 1, "total": 3, "unit": "steps", "figures": {}}
    write_json(attempt / "runtime" / "progress.json", told)
    assert read_progress(attempt) == told
    assert read_progress(home.attempt(RUN, 1)) is None


def test_time_left_restarts_when_the_unit_changes() -> None:
    out = io.StringIO()
    view = PlainLines(out, interval=0.0)
    view.started("sft", "")
    view.progressed("sft", 10**9, 10**9, "bytes sent", {})
    for done in (0, 5):
        time.sleep(0.01)
        view.progressed("sft", done, 10, "steps", {})
    assert out.getvalue().splitlines()[-1].endswith("left")
