"""Recovery from killed, stopped and unreachable workers and commands, with real processes and signals."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from drill_cases import (
    begin,
    carry_out,
    drill_control,
    drill_plan,
    family,
    hanging,
    only_run,
    wait_for,
    worker_of,
)
from sqlalchemy import select

from perilune.cli.console import PlainLines
from perilune.cli.inspect.run_table import live_stages
from perilune.cli.train.follow import show_event
from perilune.control.queries.explanation import explain_run
from perilune.control.record.ledger import commit_result
from perilune.control.record.store import Attempt, Event, Run
from perilune.control.runs.experiments import Control, advance, follow_run
from perilune.control.runs.planner import RetryPolicy
from perilune.control.runs.progress import (
    StageEvent,
    StageFailed,
    StageFinished,
    StageProgress,
    StageResumed,
    StageReused,
    StageStarted,
)
from perilune.control.runs.requests import cancel_run, retry_run
from perilune.errors import RequestError, WorkFailedError
from perilune.execution.placements import local
from perilune.execution.placements.protocol import Assignment
from perilune.execution.processes import Presence
from perilune.execution.verdict import read_verdict
from perilune.files import read_json, read_json_lines, write_json

COMMAND = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
from drill_cases import carry_out, drill_control, drill_plan
events = carry_out(drill_control(Path(sys.argv[1])), drill_plan("drill", steps=4, gate=sys.argv[2]))
print(type(events[-1]).__name__)
"""


def attempts(control: Control, run_id: str) -> list[Attempt]:
    with control.store.snapshot() as session:
        query = select(Attempt).where(Attempt.run_id == run_id).order_by(Attempt.number)
        return list(session.scalars(query))


def totals(control: Control, run: Run) -> list[int]:
    return [row["total"] for row in read_json_lines(control.directory(run) / "artifacts" / "metrics.jsonl")]


@pytest.mark.parametrize("victim", ["worker", "task", "worker with daemon"])
def test_killed_attempt_resumes_from_its_last_checkpoint(control: Control, victim: str) -> None:
    events, attempt = hanging(control, "daemon" if victim.endswith("daemon") else "hang")
    os.kill(family(attempt)[0] if victim == "task" else worker_of(attempt), signal.SIGKILL)
    seen = list(events)
    resumed = next(event for event in seen if isinstance(event, StageResumed))
    assert (resumed.attempt, resumed.cause) == (2, "killed" if victim == "task" else "runner_died")
    assert isinstance(seen[-1], StageFinished) and seen[-1].summary["began_at"] == 2
    run = only_run(control)
    assert [attempt.state for attempt in attempts(control, run.id)] == ["failed", "succeeded"]
    assert [attempt.cleanup for attempt in attempts(control, run.id)] == ["done", "done"]
    assert totals(control, run) == [2, 6, 12, 20]  # the same as without the kill
    assert not family(attempt)


def test_run_survives_killed_command_and_next_command_attaches(control: Control, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    code = COMMAND.format(here=str(Path(__file__).parents[1] / "drill"))
    arguments = [sys.executable, "-c", code, str(control.home.root), str(gate)]
    first = subprocess.Popen(arguments)
    wait_for(lambda: any(control.home.runs.glob("*/attempts/1/runtime/claim.json")), "a claim")
    first.kill()
    first.wait()
    attempt = control.directory(only_run(control))
    worker = worker_of(attempt)
    second = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    plan = drill_plan(steps=4, gate=str(gate))
    third = advance(control, begin(control, [plan]), [plan], poll=0.02)
    started = next(third)
    assert isinstance(started, StageStarted) and started.attached
    assert worker_of(attempt) == worker
    gate.touch()
    assert isinstance(list(third)[-1], StageFinished)
    assert second.communicate()[0] in {"StageFinished\n", "StageReused\n"}  # it may find the run finished
    assert only_run(control).current_epoch == 1


def test_finished_stage_is_reused_and_changed_stage_runs_again(control: Control) -> None:
    plans = [drill_plan("first", steps=2), drill_plan("second", {"data": "first"}, steps=1)]
    once = carry_out(control, *plans)
    assert [type(event) for event in once if not isinstance(event, StageProgress)] == [
        StageStarted,
        StageFinished,
        StageStarted,
        StageFinished,
    ]
    assert once[-1].summary["total"] == 6 + 2  # the second stage starts from the total of the first
    assert [type(event) for event in carry_out(control, *plans)] == [StageReused, StageReused]
    changed = [plans[0], drill_plan("second", {"data": "first"}, steps=2)]
    again = carry_out(control, *changed, name="changed")
    assert isinstance(again[0], StageReused) and isinstance(again[-1], StageFinished)
    assert again[0].run_id == once[0].run_id and again[-1].run_id != once[-1].run_id


@pytest.mark.thorough
def test_result_with_missing_artifacts_is_not_reused(control: Control) -> None:
    first = carry_out(control, drill_plan(steps=1))[-1]
    (control.directory(only_run(control)) / "artifacts" / "data" / "total.json").unlink()
    second = carry_out(control, drill_plan(steps=1))[-1]
    assert isinstance(second, StageFinished) and second.run_id != first.run_id


def test_task_failure_is_not_retried(control: Control) -> None:
    last = carry_out(control, drill_plan(fail_at=1, how="work"))[-1]
    assert isinstance(last, StageFailed)
    assert (last.cause, last.message, last.cancelled) == ("work_failed", "nothing was learnt", False)
    assert last.log_tail.endswith("failed: nothing was learnt")
    assert only_run(control).current_epoch == 1


@pytest.mark.thorough
def test_infrastructure_retries_are_bounded(tmp_path: Path) -> None:
    control = drill_control(tmp_path / "home", RetryPolicy(infrastructure=1, base=0.01))
    last = carry_out(control, drill_plan(fail_at=1, how="kill"))[-1]
    assert isinstance(last, StageFailed) and last.cause == "killed"
    assert [attempt.state for attempt in attempts(control, last.run_id)] == ["failed", "failed"]


@pytest.mark.thorough
def test_sigterm_to_worker_counts_as_preemption(control: Control) -> None:
    events, attempt = hanging(control)
    os.kill(worker_of(attempt), signal.SIGTERM)
    assert isinstance(list(events)[-1], StageFinished)
    run = only_run(control)
    assert [attempt.state for attempt in attempts(control, run.id)] == ["preempted", "succeeded"]
    assert totals(control, run) == [2, 6, 12, 20]


def test_cancel_ends_all_processes_and_next_run_resumes_from_checkpoint(control: Control) -> None:
    events, attempt = hanging(control)
    assert len(family(attempt)) == 1
    run = cancel_run(control, only_run(control).id)
    assert run.state == "cancelled" and not family(attempt)
    assert attempts(control, run.id)[0].manifest_digest  # its files are attested
    last = list(events)[-1]
    assert isinstance(last, StageFailed) and last.cancelled
    show_event(last, PlainLines(shown := io.StringIO()))
    assert shown.getvalue() == "[drill] cancelled\n"
    with pytest.raises(RequestError, match="already been cancelled"):
        cancel_run(control, run.id)
    again = carry_out(control, drill_plan(steps=4, fail_at=2, how="hang", fresh_only=True))
    assert isinstance(again[-1], StageFinished) and again[-1].summary["began_at"] == 2
    assert control.run(again[-1].run_id).retry_of == run.id


def test_clock_set_back_gives_no_negative_duration(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, wall = drill_plan(), time.time
    events = advance(control, begin(control, [plan]), [plan])
    next(events)
    monkeypatch.setattr("time.time", lambda: wall() - 7200.0)
    (live,) = live_stages(control, 1, refresh=False)
    assert live.seconds == 0.0
    *_, last = events
    assert isinstance(last, StageFinished) and last.seconds == 0.0
    (attempt,) = attempts(control, last.run_id)
    assert attempt.ended is not None and attempt.ended >= attempt.created


def test_cancel_of_queued_run_creates_no_attempt(control: Control) -> None:
    plan = drill_plan()
    events = advance(control, begin(control, [plan]), [plan])
    queued = next(events).run_id
    assert cancel_run(control, queued).state == "cancelled"
    assert attempts(control, queued) == []


def test_cancel_between_start_and_claim_leaves_no_worker(control: Control) -> None:
    plan = drill_plan(seconds=5.0)
    run_id = next(advance(control, begin(control, [plan]), [plan])).run_id
    control.reconciler.reconcile(run_id)  # admitted, staged, started
    assert attempts(control, run_id)[0].state == "starting"
    other = drill_control(control.home.root)  # another command, which did not start the worker
    run = cancel_run(other, run_id)
    assert run.state == "cancelled"
    attempt = control.directory(run)
    there = Assignment(run_id, 1, attempt)
    wait_for(lambda: not control.reconciler.placements.local.is_starting(there), "the worker's end")
    assert not family(attempt)


def test_start_timeout_does_not_end_worker_with_claim(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, attempt = hanging(control)
    monkeypatch.setattr(local, "START_TIMEOUT_S", 0.0)
    there = Assignment(only_run(control).id, 1, attempt)
    assert control.reconciler.placements.local.is_starting(there)
    control.reconciler.reconcile_all()
    assert family(attempt), "the start timeout ended a worker with a claim"
    cancel_run(control, only_run(control).id)


def test_cancel_request_survives_killed_command(control: Control) -> None:
    _, attempt = hanging(control)
    run_id = only_run(control).id
    with control.store.transaction() as session:
        session.get_one(Run, run_id).desired = "cancelled"  # the only trace of a command killed at once
    control.reconciler.reconcile_all()
    assert control.run(run_id).state == "cancelled" and not family(attempt)


def test_success_wins_over_late_cancel(control: Control) -> None:
    plan = drill_plan(steps=1)
    run_id = next(advance(control, begin(control, [plan]), [plan])).run_id
    control.reconciler.reconcile(run_id)
    result = control.home.attempt(run_id, 1) / "runtime" / "result.json"
    wait_for(result.exists, "an unobserved result")
    assert cancel_run(control, run_id).state == "succeeded"


def test_result_of_old_epoch_is_refused(control: Control) -> None:
    _, attempt = hanging(control)
    os.kill(family(attempt)[0], signal.SIGKILL)
    run_id = only_run(control).id
    verdict = wait_for(lambda: read_verdict(attempt / "runtime", 1), "a verdict")
    with control.store.transaction() as session:
        session.get_one(Run, run_id).current_epoch = 2
    with (
        pytest.raises(WorkFailedError, match="attempt 1 is out of date"),
        control.store.transaction() as session,
    ):
        commit_result(session, session.get_one(Run, run_id), 1, verdict)
    assert control.run(run_id).state == "active"


@pytest.mark.thorough
def test_claim_from_before_a_reboot_counts_as_dead(control: Control) -> None:
    events, attempt = hanging(control)
    path = attempt / "runtime" / "claim.json"
    os.kill(worker_of(attempt), signal.SIGKILL)
    # After the reboot, another process has the worker's process ID: this one.
    path.write_text(json.dumps(read_json(path) | {"pid": os.getpid(), "boot_id": "before"}))
    assert isinstance(list(events)[-1], StageFinished)
    assert [attempt.cause for attempt in attempts(control, only_run(control).id)] == ["runner_died", ""]


@pytest.mark.thorough
def test_unreachable_attempt_keeps_running_until_policy_declares_it_lost(control: Control) -> None:
    _, attempt = hanging(control)
    run_id = only_run(control).id
    path = attempt / "runtime" / "claim.json"
    claim = read_json(path)
    path.write_text(json.dumps(claim | {"host": "elsewhere"}))
    try:
        for _ in range(3):
            assert control.reconciler.reconcile(run_id).state == "active"
        (seen,) = attempts(control, run_id)
        assert (seen.state, seen.reachability) == ("running", "unreachable")
        patient = drill_control(control.home.root, RetryPolicy(lost_after=0.0, base=0.001))
        events = list(follow_run(patient, run_id, poll=0.02))
        assert isinstance(events[-1], StageFinished)
        first, second = attempts(control, run_id)
        assert (first.state, first.cause, second.state) == ("lost", "unreachable", "succeeded")
        assert family(attempt) and first.cleanup == "pending"
    finally:
        write_json(path, claim)  # the lost attempt becomes visible again
    control.reconciler.reconcile_all()
    assert not family(attempt) and attempts(control, run_id)[0].cleanup == "done"


def test_unreachable_run_needs_force_to_cancel_and_stops_when_seen_again(control: Control) -> None:
    _, attempt = hanging(control)
    run_id = only_run(control).id
    path = attempt / "runtime" / "claim.json"
    claim = read_json(path)
    path.write_text(json.dumps(claim | {"host": "elsewhere"}))
    with pytest.raises(WorkFailedError, match="unreachable") as refused:
        cancel_run(control, run_id)
    assert refused.value.remedy.endswith(f"perilune cancel {run_id} --force")
    assert control.run(run_id).state == "active"

    ended = cancel_run(control, run_id, force=True)
    (given_up,) = attempts(control, run_id)
    assert (ended.state, ended.forced) == ("cancelled", True)
    assert (given_up.state, given_up.cause, given_up.cleanup) == ("lost", "unreachable", "pending")
    with control.store.snapshot() as session:
        kinds = list(session.scalars(select(Event.kind).where(Event.run_id == run_id).order_by(Event.seq)))
    assert kinds[-6:] == [
        "run.cancel_requested", "attempt.unreachable", "run.cancel_forced",
        "attempt.cleanup_pending", "attempt.lost", "run.cancelled",
    ]  # fmt: skip
    with pytest.raises(RequestError, match="already been cancelled"):
        cancel_run(control, run_id, force=True)
    control.reconciler.reconcile_all()
    assert family(attempt) and [attempt.number for attempt in control.reconciler.unclean_attempts()] == [1]

    write_json(path, claim)  # the attempt becomes visible again
    control.reconciler.reconcile_all(act=False)
    assert not family(attempt) and not control.reconciler.unclean_attempts()
    assert control.run(run_id).state == "cancelled" and control.run(run_id).manifest_digest is None


@pytest.mark.thorough
def test_force_cancels_run_whose_processes_cannot_be_killed(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, attempt = hanging(control)
    run_id = only_run(control).id
    with monkeypatch.context() as patch:
        patch.setattr(control.reconciler.placements.local, "stop", lambda *_: False)  # as after a hung disk
        with pytest.raises(WorkFailedError, match="not yet proven"):
            cancel_run(control, run_id, patience=0.0)
        assert cancel_run(control, run_id, force=True).state == "cancelled"
        assert family(attempt) and control.reconciler.unclean_attempts()
    control.reconciler.reconcile_all()
    assert not family(attempt) and not control.reconciler.unclean_attempts()


def test_retry_creates_linked_run_from_last_checkpoint(control: Control) -> None:
    failed = carry_out(control, drill_plan(steps=4, fail_at=2, how="raise", fresh_only=True))[-1]
    assert isinstance(failed, StageFailed)
    new = retry_run(control, failed.run_id)
    assert new.id != failed.run_id and new.retry_of == failed.run_id
    assert new.bundle_digest == control.run(failed.run_id).bundle_digest
    with pytest.raises(RequestError, match="queued"):
        retry_run(control, new.id)
    last = list(follow_run(control, new.id, poll=0.02))[-1]
    assert isinstance(last, StageFinished) and last.summary["began_at"] == 2
    with pytest.raises(RequestError, match="succeeded"):
        retry_run(control, new.id)
    assert control.run(failed.run_id).state == "failed"  # history is not rewritten


def test_failed_worker_start_is_reported_with_its_output(
    control: Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "psutil.py").write_text("raise ImportError('psutil is broken here')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'broken'}:{os.environ['PYTHONPATH']}")
    control.reconciler.placements.policy = RetryPolicy(infrastructure=0)
    last = carry_out(control, drill_plan())[-1]
    assert isinstance(last, StageFailed) and last.cause == "start_failed"
    assert "psutil is broken here" in last.message


@pytest.mark.parametrize("content", ["{", "[]", '{"epoch": 1, "cause": "", "exit_code": "0"}'])
def test_damaged_result_ends_the_run(control: Control, content: str) -> None:
    plan = drill_plan(steps=1)
    run_id = next(advance(control, begin(control, [plan]), [plan])).run_id
    control.reconciler.reconcile(run_id)
    attempt = control.home.attempt(run_id, 1)
    wait_for((attempt / "runtime" / "result.json").exists, "the result")
    placement, there = control.reconciler.placements.local, Assignment(run_id, 1, attempt)
    wait_for(lambda: placement.observe(there).worker is Presence.ABSENT, "the end of the worker")
    (attempt / "runtime" / "result.json").write_text(content)
    last = list(follow_run(control, run_id, poll=0.02))[-1]
    assert (
        isinstance(last, StageFailed) and last.cause == "artifact_invalid" and "result.json" in last.message
    )
    again = carry_out(control, plan)
    assert isinstance(again[-1], StageFinished)
    (control.home.attempt(again[-1].run_id, 1) / "runtime" / "result.json").write_text(content)
    assert not control.is_intact(control.run(again[-1].run_id))


def test_cancel_while_another_command_watches(control: Control) -> None:
    events, attempt = hanging(control)
    seen: list[StageEvent] = []
    watcher = threading.Thread(target=lambda: seen.extend(events))
    watcher.start()
    other = drill_control(control.home.root)
    assert cancel_run(other, only_run(control).id).state == "cancelled"
    watcher.join()
    assert isinstance(seen[-1], StageFailed) and seen[-1].cancelled
    assert not family(attempt)


def test_explain_reports_suspended_worker(control: Control) -> None:
    events, attempt = hanging(control)
    run = only_run(control)
    assert "continues by itself" in explain_run(control, run.id).next
    worker = worker_of(attempt)
    os.kill(worker, signal.SIGSTOP)
    try:
        long_ago = time.time() - 100.0
        os.utime(attempt / "runtime" / "heartbeat.json", (long_ago, long_ago))
        answer = explain_run(control, run.id)
        assert "continues by itself" not in answer.next and "has not reported for 10" in answer.because[-1]
        assert answer.commands == (f"perilune cancel {run.id}",)
    finally:
        os.kill(worker, signal.SIGCONT)
    cancel_run(control, run.id)
    events.close()  # type: ignore[attr-defined]
