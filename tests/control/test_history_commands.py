"""The commands explain, wait and events, and shell completion."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from drill_cases import Command, carry_out, drill_plan, hanging, only_run, wait_for, worker_of

from perilune.control.queries.explanation import explain_run
from perilune.control.runs.experiments import Control
from perilune.control.runs.requests import request_cancel
from perilune.files import read_json, write_json


def test_explain_describes_active_run_in_each_state(perilune: Command, control: Control) -> None:
    _, attempt = hanging(control)
    run_id = only_run(control).id
    answer = explain_run(control, run_id)
    assert answer.state == "active" and answer.next == "nothing to do: its worker continues by itself"
    assert "attempt 1 is running" in answer.because and answer.because[-1].endswith("of 4 steps")
    code, out, _ = perilune("explain", "drill")
    assert code == 0 and f"its worker is alive (worker {worker_of(attempt)}," in out and "try" in out

    path = attempt / "runtime" / "claim.json"
    claim = read_json(path)
    write_json(path, claim | {"host": "elsewhere"})
    answer = explain_run(control, run_id)
    assert "is unreachable from here" in answer.because[1] and answer.next.startswith(
        "nothing, until it is reachable"
    )
    assert answer.commands == (f"perilune cancel {run_id} --force",)
    write_json(path, claim)

    request_cancel(control, run_id)
    assert explain_run(control, run_id).next == "it is stopped"
    os.kill(worker_of(attempt), signal.SIGKILL)
    wait_for(lambda: "is dead" in " ".join(explain_run(control, run_id).because), "the death")
    assert control.run(run_id).state == "active"  # explaining records nothing
    assert perilune("wait", "drill")[0] == 3
    answer = explain_run(control, run_id)
    assert answer.state == "cancelled" and answer.because[-1] == "cancellation was requested"
    assert answer.commands == (f"perilune retry {run_id}",)


def test_wait_starts_next_attempt_after_worker_death(perilune: Command, control: Control) -> None:
    _, attempt = hanging(control)
    os.kill(worker_of(attempt), signal.SIGKILL)
    wait_for(lambda: "runner_died" in perilune("explain", "drill")[1], "the recorded death")
    document = json.loads(perilune("explain", "drill", "--json")[1])
    assert document["state"] == "queued" and "starts attempt 2" in document["next"]
    assert document["because"][0].startswith("attempt 1 failed: runner_died")
    code, out, _ = perilune("wait", "drill", "--json")  # wait starts the next attempt
    assert code == 0 and json.loads(out)["attempts"] == 2
    first, second = perilune("logs", "drill")[1].split("--- attempt 2 ---\n")
    assert "begins at step 0" in first and "begins at step 2" in second


@pytest.mark.parametrize(("how", "code", "kind"), [("work", 1, "user"), ("request", 2, "user"), ("", 0, "")])
def test_explain_and_exit_code_of_wait_report_the_outcome(
    perilune: Command, control: Control, how: str, code: int, kind: str
) -> None:
    carry_out(control, drill_plan(steps=1, fail_at=0 if how else -1, how=how))
    assert perilune("wait", "drill")[0] == code
    answer = explain_run(control, only_run(control).id)
    if kind:
        assert f"counts as {kind}: at most 0 retries" in " ".join(answer.because)
        suggestion = "; the error suggests: write another" if how == "request" else ""
        assert answer.next == f"nothing, unless you retry it{suggestion}"
        assert answer.commands[0].startswith("perilune logs")
    else:
        assert answer.because == ("attempt 1 succeeded", "its artifacts are complete and intact")
        (control.directory(only_run(control)) / "artifacts" / "manifest.json").unlink()
        assert "damaged or missing" in explain_run(control, only_run(control).id).because[-1]


def test_wait_times_out_with_exit_code_124(perilune: Command, control: Control) -> None:
    hanging(control)
    code, out, _ = perilune("wait", "drill", "--timeout", "0.2")
    assert code == 124 and out == "drill: active, not ended after 0.2 s\n"
    assert perilune("wait", "nothing")[0] == 2


def test_events_prints_all_events_or_those_of_one_run(
    perilune: Command, control: Control, tmp_path: Path
) -> None:
    carry_out(control, drill_plan("one", steps=1), drill_plan("two", steps=1, fail_at=0, how="request"))
    assert perilune("wait", "one", "--timeout", "inf")[0] == 0
    whole = json.loads(perilune("events", "--json")[1])["events"]
    assert [event["seq"] for event in whole] == list(range(1, len(whole) + 1))
    assert {"experiment.created", "run.queued", "start.intended", "run.succeeded"} <= {
        x["kind"] for x in whole
    }
    of_one = json.loads(perilune("events", "one", "--json")[1])["events"]
    assert of_one == [event for event in whole if event["run"] == of_one[0]["run"]]
    lines = perilune("events", "two", "-n", "2")[1].splitlines()
    assert len(lines) == 2 and "run.failed  cause=request_error" in lines[1]
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ  ", lines[0])  # in UTC, as in logs


def test_shell_completes_commands_options_and_runs(control: Control) -> None:
    carry_out(control, drill_plan("first", steps=1))

    def completed(line: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        words["_PERILUNE_COMPLETE"] = "complete_bash"
        command = [sys.executable, "-m", "perilune.cli.main"]
        ran = subprocess.run(command, env=os.environ | words, capture_output=True, text=True, check=False)
        return ran.stdout.split()

    assert {"run", "runs"} <= set(completed("perilune ru"))
    assert "--last" in completed("perilune runs --")
    assert "verify" in completed("perilune bundle ")
    assert completed("perilune show fi") == ["first"]
    assert completed("perilune show drills/") == ["drills/first"]
