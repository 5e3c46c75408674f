"""The daemon: one per home, replaced after a kill, stopped by SIGTERM."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest
from drill_cases import begin, drill_plan, wait_for

from perilune.bundle.freeze import freeze
from perilune.cli.machines import daemon
from perilune.control.record.home import has_daemon
from perilune.control.record.transitions import RunState
from perilune.control.runs.experiments import Control
from perilune.control.runs.submission import Submission, submit_stage
from perilune.files import locked

COMMAND = [sys.executable, "-m", "perilune.cli.main", "daemon", "--every", "0.2"]


def submitted(control: Control, name: str) -> str:
    plan = drill_plan(name, steps=1)
    submission = Submission(begin(control, [plan], name), name, "drill")
    return submit_stage(control.home, control.store, submission, partial(freeze, plan.job, {})).id


def test_two_commands_that_look_for_a_daemon_find_none(control: Control) -> None:
    control.home.daemon.mkdir()
    with locked(control.home.daemon / "lock", shared=True) as looking:
        assert looking and not has_daemon(control.home)


def test_watching_prints_a_line_of_json_for_each_check(
    control: Control, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(control, "one")
    pauses = iter([None])
    monkeypatch.setattr(daemon.time, "sleep", lambda _: next(pauses))
    with pytest.raises(StopIteration):
        daemon.reconcile(watch=True, as_json=True)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert [run["stage"] for run in first["runs"]] == ["one"] and "runs" in second


@pytest.fixture
def daemons() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def start(daemons: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    daemons.append(process)
    assert process.stdout is not None and "watching" in process.stdout.readline()
    return process


def test_daemon_finishes_runs_of_a_killed_daemon(
    control: Control, daemons: list[subprocess.Popen[str]]
) -> None:
    first = start(daemons)
    one = submitted(control, "one")
    wait_for(lambda: control.run(one).current_epoch == 1)
    os.kill(first.pid, signal.SIGKILL)
    second = start(daemons)
    two = submitted(control, "two")
    for run in (one, two):
        wait_for(lambda run=run: control.run(run).state == RunState.SUCCEEDED)
    refused = subprocess.run(COMMAND, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "is already running" in refused.stderr
    second.terminate()
    out, err = second.communicate(timeout=60)
    assert second.returncode == 0 and "stopped by SIGTERM" in out and err == ""
