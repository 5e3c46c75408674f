"""Slots and priorities: at most one active run per slot, highest priority first, and no run starves."""

from functools import partial
from pathlib import Path

import pytest
from drill_cases import begin, drill_plan, wait_for
from sqlalchemy import select

from perilune.bundle.freeze import freeze
from perilune.control.queries.explanation import explain_run
from perilune.control.record.home import announce_starter
from perilune.control.record.store import Event
from perilune.control.record.transitions import RunState
from perilune.control.runs.experiments import Control, StagePlan
from perilune.control.runs.submission import Submission, submit_stage
from perilune.control.runs.templates import Template


def submitted(control: Control, name: str, template: Template, **spec: object) -> str:
    plan: StagePlan = drill_plan(name, **spec)
    experiment = begin(control, [plan], name)
    submission = Submission(experiment, name, "drill", template=template, part="first")
    return submit_stage(control.home, control.store, submission, partial(freeze, plan.job, {})).id


def states(control: Control, runs: list[str]) -> list[str]:
    return [control.run(run).state for run in runs]


def start_order(control: Control) -> list[str]:
    with control.store.snapshot() as session:
        query = select(Event.run_id).where(Event.kind == "attempt.planned").order_by(Event.seq)
        return [run for run in session.scalars(query) if run]


@pytest.mark.thorough
def test_runs_start_in_order_of_priority(control: Control) -> None:
    low = [submitted(control, f"low{number}", Template(slots=1), steps=1) for number in range(2)]
    high = submitted(control, "high", Template(slots=1, priority=5), steps=1)
    runs = [*low, high]
    most = 0

    def all_succeeded() -> bool:
        nonlocal most
        control.reconciler.reconcile_all()
        most = max(most, states(control, runs).count("active"))
        return states(control, runs) == ["succeeded"] * 3

    wait_for(all_succeeded, "the end of all runs")
    assert most == 1
    assert start_order(control) == [high, *low]


@pytest.mark.thorough
def test_waiting_run_advances_the_runs_before_it(control: Control) -> None:
    first = submitted(control, "first", Template(slots=1), steps=1)
    second = submitted(control, "second", Template(slots=1), steps=1)
    turn = explain_run(control, second)
    assert "attempt 1 waits for a slot: 0 of 1 slots are taken, 1 ahead in the queue" in turn.because
    wait_for(lambda: control.reconciler.reconcile(second).state == RunState.SUCCEEDED)  # not `first`
    assert control.run(first).state == RunState.SUCCEEDED
    assert start_order(control) == [first, second]


def test_explanation_of_queued_run_leaves_it_to_a_running_command(control: Control) -> None:
    run = submitted(control, "first", Template(), steps=1)
    assert explain_run(control, run).commands[0] == "perilune reconcile"
    with announce_starter(control.home, control.run(run).experiment_id):
        answer = explain_run(control, run)
    assert answer.because == ("attempt 1 is about to start",)
    assert answer.next == "the command that is running starts attempt 1"
    assert answer.commands == (f"perilune wait {run}",)


def test_slots_count_all_runs_of_a_placement_and_are_unlimited_by_default(
    control: Control, tmp_path: Path
) -> None:
    gate = str(tmp_path / "gate")
    runs = [submitted(control, f"free{number}", Template(), steps=1, gate=gate) for number in range(3)]
    control.reconciler.reconcile_all()
    assert states(control, runs) == ["active"] * 3
    slots = Template(slots=5)
    two = [submitted(control, f"two{number}", slots, steps=1, gate=gate) for number in range(2)]
    control.reconciler.reconcile_all()
    assert states(control, two) == ["active"] * 2  # five active runs, three without slots
    one = submitted(control, "one", slots, steps=1)
    assert explain_run(control, one).because[-1].endswith("5 of 5 slots are taken")
    Path(gate).touch()
    wait_for(lambda: control.reconciler.reconcile_all() == [])


def test_cancelled_run_does_not_block_the_queue(control: Control) -> None:
    from perilune.control.runs.requests import request_cancel

    first = submitted(control, "first", Template(slots=1, priority=9), steps=1)
    request_cancel(control, first)
    second = submitted(control, "second", Template(slots=1), steps=1)
    control.reconciler.reconcile(second)
    assert control.run(second).state == RunState.ACTIVE
    wait_for(lambda: control.reconciler.reconcile_all() == [])
