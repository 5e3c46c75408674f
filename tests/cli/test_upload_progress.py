"""The command shows upload progress while it sends files to machines."""

import io
import time
from pathlib import Path

from perilune.cli.console import PlainLines
from perilune.control.runs.experiments import read_progress
from perilune.files import write_json


def test_upload_progress_sums_machines_until_a_task_reports(tmp_path: Path) -> None:
    attempt = tmp_path / "2"
    (attempt / "runtime").mkdir(parents=True)
    for node, done in enumerate((1000, 500)):
        sent = {"done": done, "total": 2000, "unit": "bytes sent", "figures": {}}
        write_json(attempt.with_name(f"2.sent-{node}.json"), sent)
    assert read_progress(attempt) == {"done": 1500, "total": 4000, "unit": "bytes sent", "figures": {}}
    progress = {"done": 1, "total": 3, "unit": "steps", "figures": {}}
    write_json(attempt / "runtime" / "progress.json", progress)
    assert read_progress(attempt) == progress
    assert read_progress(tmp_path / "1") is None


def test_time_left_restarts_when_the_unit_changes() -> None:
    out = io.StringIO()
    view = PlainLines(out, interval=0.0)
    view.start("sft", "")
    view.update("sft", 10**9, 10**9, "bytes sent", {})
    for done in (0, 5):
        time.sleep(0.01)
        view.update("sft", done, 10, "steps", {})
    assert out.getvalue().splitlines()[-1].endswith("left")
