"""The commands for runs, through the command line."""

import json
import os
import re
import signal
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from drill_cases import (
    Command,
    begin,
    carry_out,
    drill_bundle,
    drill_plan,
    family,
    hanging,
    wait_for,
    worker_of,
)

from perilune.bundle.manifest import write_manifest
from perilune.cli.inspect.run_table import describe_doubts
from perilune.cli.train.lifecycle import stopped_document
from perilune.control.queries import lookup
from perilune.control.queries.lookup import find_experiment, find_run, latest_experiments, stage_statuses
from perilune.control.runs.experiments import Control, advance
from perilune.control.runs.progress import StageFinished, StageProgress
from perilune.control.runs.reproduction import reproduce_run
from perilune.control.runs.requests import stream_log
from perilune.execution.processes import Presence, ProcessIdentity
from perilune.ui.live.listing import Listing


def test_commands_in_empty_home_suggest_next_command(perilune: Command) -> None:
    assert perilune("runs") == (0, "no runs yet; try: perilune quickstart\n", "")
    assert json.loads(perilune("runs", "--json")[1])["runs"] == []
    code, _, err = perilune("show", "nothing")
    assert code == 2 and "no run is called 'nothing'" in err and "try: perilune runs" in err
    code, _, err = perilune("show", "x" * 60_000)
    assert code == 2 and "no run is called 'xxx" in err
    for command in ("show", "explain", "compare"):
        code, _, err = perilune(command, os.fsdecode(b"a\xff"))
        assert code == 2 and r"called 'a\udcff'" in err


def test_runs_are_listed_in_stage_order_and_found_by_id_prefix_or_name(
    perilune: Command, control: Control
) -> None:
    plans = [drill_plan("zeta", steps=1), drill_plan("alpha", {"data": "zeta"}, fail_at=0, how="work")]
    events = carry_out(control, *plans)
    code, out, _ = perilune("runs", "--json")
    listed = json.loads(out)["runs"]
    assert code == 0
    assert [(row["stage"], row["state"], row["attempts"]) for row in listed] == [
        ("zeta", "succeeded", 1),
        ("alpha", "failed", 1),
    ]
    assert listed[0]["total"] == 2 and listed[1]["cause"] == "work_failed"
    run_id = events[0].run_id
    for name in (run_id, run_id[:20], run_id[:20].lower(), "zeta", "drills/zeta"):
        assert json.loads(perilune("show", name, "--json")[1])["run"] == run_id
    code, _, err = perilune("show", run_id[:4])
    assert code == 2 and "matches 2 runs" in err
    assert perilune("show", "other/zeta")[0] == 2
    code, out, _ = perilune("show", "alpha")
    assert code == 0 and "failed (work_failed: nothing was learnt)" in out
    assert "zeta" in perilune("runs")[1]
    assert json.loads(perilune("runs", "drills", "--json")[1])["runs"] == listed


def test_json_documents_name_the_id_of_a_run_alike(perilune: Command, control: Control) -> None:
    run_id = carry_out(control, drill_plan("one", steps=1))[0].run_id
    for command in ("show one", "explain one", "wait one", "logs one"):
        document = json.loads(perilune(*command.split(), "--json")[1])
        assert document["run"] == run_id and not {"id", "run_id"} & document.keys()
    for command, key in (("runs", "runs"), ("gc", "runs"), ("events one", "events")):
        for row in json.loads(perilune(*command.split(), "--json")[1])[key]:
            assert row["run"] == run_id and not {"id", "run_id"} & row.keys()


def test_json_documents_name_the_id_of_an_experiment_alike(perilune: Command, control: Control) -> None:
    carry_out(control, drill_plan("one", steps=1))
    (experiment,) = latest_experiments(control)
    for command in ("wait drills", "rm drills", "show one"):
        assert json.loads(perilune(*command.split(), "--json")[1])["experiment_id"] == experiment
    assert stopped_document(find_experiment(control), [])["experiment_id"] == experiment
    (listed,) = json.loads(perilune("runs", "--json")[1])["runs"]
    (shown,) = Listing(control).document(1)["experiments"]
    assert listed["experiment_id"] == shown["experiment_id"] == experiment


def test_unknown_name_gets_the_closest_name_as_remedy(perilune: Command, control: Control) -> None:
    carry_out(control, drill_plan("zeta", steps=1))
    for command, close in (
        ("show zetta", "zeta"),
        ("logs drils/zeta", "drills/zeta"),
        ("wait drils/zeta", "drills/zeta"),
        ("report drils/zeta", "drills/zeta"),
        ("show drills/zeto", "drills/zeta"),
        ("runs dirlls", "drills"),
        ("wait drillls", "drills"),
    ):
        code, _, err = perilune(*command.split())
        assert code == 2 and f"try: '{close}'; perilune runs lists all\n" in err


def test_prefix_of_several_experiments_is_ambiguous(perilune: Command, control: Control) -> None:
    first, _ = (begin(control, [drill_plan(name)]) for name in ("zeta", "beta"))
    for command in ("explain", "wait", "runs", "report"):
        code, _, err = perilune(command, first[:4])
        assert code == 2 and f"'{first[:4]}' matches 2 experiments" in err


def test_report_of_a_stage_that_has_not_started_says_so(perilune: Command, control: Control) -> None:
    begin(control, [drill_plan("zeta")])
    assert "stage zeta of drills has not started" in perilune("report", "drills/zeta")[2]


def test_chat_names_the_stages_of_an_experiment_that_make_checkpoints(
    perilune: Command, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out(control, drill_plan("zeta", steps=1))
    _, _, err = perilune("chat", "zeta")
    assert "makes no checkpoint\n  try: name a run that makes one: perilune runs\n" in err
    statuses = stage_statuses(control, latest_experiments(control))
    trained = replace(statuses[0], name="warm", task="sft")
    waiting = replace(trained, name="later", run_id="")
    monkeypatch.setattr(lookup, "stage_statuses", lambda *_: [*statuses, trained, waiting])
    assert perilune("chat", "zeta")[2].endswith("try: a stage that makes one: drills/warm\n")


def test_show_prints_warnings_and_metrics(perilune: Command, control: Control) -> None:
    event = carry_out(control, drill_plan("one", steps=1))[0]
    path = control.directory(find_run(control, event.run_id)) / "artifacts" / "summary.json"
    trained = {"first": {"loss": 2.5}, "last": {"loss": 0.5}, "validation": {"validation_accuracy": 0.75}}
    summary = {**json.loads(path.read_text()), "warnings": ["the reward collapsed"], **trained}
    path.write_text(json.dumps(summary))
    write_manifest(path.parents[1])
    text = perilune("show", "one")[1]
    assert "  warning    the reward collapsed\n" in text
    assert "  loss                   2.5 to 0.5 (first to last steps)\n" in text
    assert "  held-out accuracy      75.0%\n" in text


def test_logs_diff_and_collect(perilune: Command, control: Control, tmp_path: Path) -> None:
    carry_out(control, drill_plan("one", steps=1, say="hello"), drill_plan("two", steps=2))
    code, out, _ = perilune("logs", "one")
    assert code == 0 and re.match(r"\d\d:\d\d:\d\dZ begins at step 0; hello\n", out)
    assert perilune("logs", "one", "-f")[1] == out
    assert json.loads(perilune("logs", "one", "--json")[1])["lines"] == out.splitlines()
    parts = json.loads(perilune("diff", "one", "two", "--json")[1])
    assert {change["key"] for change in parts["recipe"]} == {"stage", "spec.say", "spec.steps"}
    copy = tmp_path / "copy"
    assert perilune("collect", "one", "--out", str(copy))[0] == 0
    assert (copy / "artifacts" / "data" / "total.json").read_text() == '{\n  "total": 2\n}\n'
    assert perilune("collect", "one", "--out", str(copy))[0] == 2
    damaged = control.home.runs / json.loads(perilune("show", "one", "--json")[1])["run"]
    (damaged / "attempts" / "1" / "artifacts" / "metrics.jsonl").write_text("")
    code, _, err = perilune("collect", "one")
    assert code == 1 and "artifacts/metrics.jsonl has changed" in err
    for content in ("{}", "{", '"x"', '{"first": {"loss": 1}, "last": 2}'):
        (damaged / "attempts" / "1" / "artifacts" / "summary.json").write_text(content)
        code, out, _ = perilune("show", "one")
        assert code == 0
        assert f"  error      artifacts: damaged or missing; `perilune verify {damaged.name}`" in out


def test_logs_of_a_queued_run_are_empty(control: Control) -> None:
    plan = drill_plan()
    run_id = next(advance(control, begin(control, [plan]), [plan])).run_id
    assert control.run(run_id).current_epoch == 0
    assert list(islice(stream_log(control, run_id), 1)) == []  # it repeated "attempt 2" without end


def test_logs_escape_terminal_control_sequences(perilune: Command, control: Control) -> None:
    text = "\x1b]52;c;cm0=\x07\x1b[2J\x9b2K done\rover"
    carry_out(control, drill_plan("loud", steps=1, say=text))
    code, out, _ = perilune("logs", "loud")
    assert code == 0 and "\\x1b]52;c;cm0=\\x07\\x1b[2J\\x9b2K done\nover" in out
    assert not set("\x1b\x07\x9b\r") & set(out)
    code, out, _ = perilune("logs", "loud", "--json")  # JSON output has the unescaped text
    assert any(text.partition("\r")[0] in line for line in json.loads(out)["lines"]) and out.isascii()


def test_reproduce_exits_with_0_only_for_identical_results(perilune: Command, control: Control) -> None:
    carry_out(control, drill_plan("same", steps=2), drill_plan("noisy", steps=1, noise=True))
    code, out, _ = perilune("reproduce", "same", "--json")
    assert code == 0 and json.loads(out)["identical"] is True
    run_id = json.loads(out)["run"]
    assert not (control.home.run(run_id) / "reproductions").exists()
    code, out, _ = perilune("reproduce", "noisy", "--json")
    document = json.loads(out)
    assert code == 1 and document["identical"] is False
    assert len(document["differences"]) == 1 and "artifacts/noise has changed" in document["differences"][0]
    assert Path(document["directory"], "runtime", "result.json").exists()


def test_damaged_bundle_or_recipe_is_named(perilune: Command, control: Control, tmp_path: Path) -> None:
    last = carry_out(control, drill_plan("one", steps=1))[-1]
    (recipe,) = control.home.experiments.glob("*/recipe.json")
    page = tmp_path / "report.html"
    for content, why in (("{", "not valid JSON"), ("[]", "not the recipe of an experiment")):
        recipe.write_text(content)
        assert perilune("report", "one", "--out", str(page))[0] == 0
        assert why in page.read_text()
    (control.home.bundle(last.run_id) / "job.json").unlink()
    code, _, err = perilune("reproduce", "one")
    assert code == 2 and "job.json is missing" in err
    result = control.home.attempt(last.run_id, 1) / "runtime" / "result.json"
    result.write_text("true")
    code, _, err = perilune("bundle", "inspect", str(result.parents[1]))
    assert code == 2 and "result.json: not a JSON object" in err
    assert "artifacts: damaged or missing" in perilune("show", "one")[1]


def test_interrupted_reproduction_leaves_nothing_behind(control: Control) -> None:
    *_, event = carry_out(control, drill_plan("slow", steps=3, seconds=0.5))
    again = reproduce_run(control, event.run_id)
    assert isinstance(next(again), StageProgress)
    again.close()  # type: ignore[attr-defined]  # as Ctrl-C does
    assert not (control.home.run(event.run_id) / "reproductions").exists()
    assert not list(control.home.temporary.iterdir())


def test_reproduce_names_changed_package(
    perilune: Command, control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "lib" / "swapped-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: swapped\nVersion: 1.0\n")
    (info / "RECORD").write_text("swapped.py,sha256=one,0\n")
    (info.parent / "swapped.py").touch()
    (info.parent / "sitecustomize.py").write_text("import swapped")
    monkeypatch.setenv("PYTHONPATH", str(info.parent), prepend=os.pathsep)
    carry_out(control, drill_plan("same", steps=1))
    (info / "RECORD").write_text("swapped.py,sha256=another,0\n")
    code, out, _ = perilune("reproduce", "same")
    assert code == 0 and "swapped 1.0, installed files: sha256 " in out


def test_commands_report_attempts_not_proven_to_have_stopped(perilune: Command, control: Control) -> None:
    _, attempt = hanging(control)
    path = attempt / "runtime" / "claim.json"
    claim = path.read_text()
    path.write_text(json.dumps(json.loads(claim) | {"host": "elsewhere"}))
    code, _, err = perilune("cancel", "drill")
    assert code == 1 and "unreachable" in err and "--force" in err
    code, out, err = perilune("cancel", "drill", "--force")
    assert code == 0 and "cancelled" in out and "attempt 1 of run" in err
    for command in (("runs",), ("show", "drill"), ("reconcile",)):
        out, err = perilune(*command)[1:]
        assert "not proven to have stopped" in out + err
    assert json.loads(perilune("runs", "--json")[1])["runs"][0]["cleanup"] == "pending"
    path.write_text(claim)
    assert perilune("reconcile") == (0, "no live runs\n", "")
    assert not family(attempt)


def test_cancel_retry_and_reconcile(perilune: Command, control: Control) -> None:
    _, attempt = hanging(control)
    assert json.loads(perilune("reconcile", "--json")[1])["runs"][0]["state"] == "active"
    code, out, _ = perilune("cancel", "drill", "--json")
    assert code == 0 and json.loads(out)["state"] == "cancelled" and not family(attempt)
    assert perilune("cancel", "drill")[0] == 2
    code, out, _ = perilune("retry", "drill", "--json")
    assert code == 0 and json.loads(out)["state"] == "succeeded"
    assert perilune("reconcile") == (0, "no live runs\n", "")


@pytest.mark.parametrize(("how", "expected"), [("request", 2), ("work", 1)])
def test_retry_that_fails_exits_as_run_does(
    perilune: Command, control: Control, how: str, expected: int
) -> None:
    carry_out(control, drill_plan(fail_at=0, how=how))
    code, out, err = perilune("retry", "drill")
    assert code == expected and "drill: failed" in out
    assert "error: stage drill, run " in err and "  try: " in err


def test_runs_records_dead_worker_and_starts_no_attempt(perilune: Command, control: Control) -> None:
    events, attempt = hanging(control)
    worker = ProcessIdentity.of(worker_of(attempt))
    assert worker is not None and worker.send(signal.SIGKILL)
    wait_for(lambda: worker.presence() is Presence.ABSENT, "the end of the worker")
    (run,) = json.loads(perilune("runs", "--json")[1])["runs"]
    assert (run["state"], run["cause"]) == ("queued", "runner_died")
    assert not (attempt.parent / "2").exists()
    assert isinstance(list(events)[-1], StageFinished)


def test_worker_command_runs_a_bundle(perilune: Command, tmp_path: Path) -> None:
    good, bad = (
        drill_bundle(tmp_path / "good", steps=1),
        drill_bundle(tmp_path / "bad", fail_at=0, how="request"),
    )
    code, out, _ = perilune("worker", str(good))
    assert code == 0 and "begins at step 0" in out and "succeeded in" in out
    code, out, _ = perilune("worker", str(bad), "--json")
    assert code == 2 and json.loads(out)["cause"] == "request_error"
    assert perilune("worker", str(tmp_path))[0] == 2


def test_reconcile_names_edited_event(perilune: Command, control: Control) -> None:
    import sqlite3

    carry_out(control, drill_plan(steps=1))
    raw = sqlite3.connect(control.home.database)
    raw.execute("DROP TRIGGER events_no_update")
    raw.execute("UPDATE events SET kind = 'run.failed' WHERE seq = 3")
    raw.commit()
    raw.close()
    code, _, err = perilune("reconcile")
    assert code == 2 and "the hash of event 3 does not match" in err


def test_doubts_omits_unreachable_after_proven_stop() -> None:
    assert describe_doubts("running", "unreachable", "none") == ", unreachable"
    assert describe_doubts("lost", "unreachable", "pending") == ", not proven to have stopped"
    assert describe_doubts("lost", "unreachable", "done") == ""
