"""Stages of an experiment share a rented machine: the handover, its cost, and the end of the sharing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cloud_cases import LEASE, all_gone, bill, rented_template
from drill_cases import begin, drill_control, drill_plan, wait_for
from fault_points import HANDOVER_POINTS, REMOTE_POINTS
from kill_cases import killed_at_every_point
from sqlalchemy import select

from perilune.bundle.verify import verify
from perilune.control.machines import lifecycle
from perilune.control.machines.budget import accrued_cost, cost_of_runs
from perilune.control.machines.lifecycle import Fleet
from perilune.control.machines.planner import Desire, Plan, RecordedMachine, plan_machine
from perilune.control.queries.lookup import attempt_uses, machine_events
from perilune.control.record.clock import Instant
from perilune.control.record.home import has_starter
from perilune.control.record.store import Attempt, Event, Machine, Operation, Run
from perilune.control.runs.experiments import Control, StagePlan, advance, open_experiment
from perilune.control.runs.progress import StageEvent, StageFinished, StageStarted
from perilune.control.runs.requests import cancel_run
from perilune.control.runs.sweeps import SweepRunner
from perilune.control.runs.templates import ResourcesChange, Template
from perilune.execution.providers.fake.client import FakeCloud
from perilune.execution.providers.fake.weather import Fault, Weather
from perilune.execution.providers.protocol import Sighting
from perilune.recipe.load import load_recipe


@pytest.fixture
def template(tmp_path: Path) -> Template:
    return rented_template(tmp_path / "python")


FIRST = drill_plan("first", steps=1)
SECOND = drill_plan("second", {"data": "first"}, steps=2)
THIRD = drill_plan("third", {"data": "second"}, steps=1)
HANGING = drill_plan("second", {"data": "first"}, steps=4, fail_at=2, how="hang", fresh_only=True)


def go(control: Control, template: Template, *plans: StagePlan) -> Iterator[StageEvent]:
    return advance(control, begin(control, plans), plans, template=template, poll=0.05)


def runs_of(events: Iterator[StageEvent]) -> list[str]:
    return [event.run_id for event in events if isinstance(event, StageFinished)]


def machines(control: Control) -> list[Machine]:
    with control.store.snapshot() as session:
        return list(session.scalars(select(Machine).order_by(Machine.created)))


def kinds(control: Control, prefix: str) -> list[str]:
    with control.store.snapshot() as session:
        kinds = session.scalars(select(Event.kind).where(Event.kind.startswith(prefix)).order_by(Event.seq))
        return [kind.removeprefix(prefix) for kind in kinds]


def finish_first_stage(events: Iterator[StageEvent]) -> None:
    """Advance until the first stage has finished."""
    while not isinstance(next(events), StageFinished):
        pass


def start_second_on_same_machine(control: Control, events: Iterator[StageEvent]) -> str:
    """Advance until the second stage runs on the machine of the first; return its run id."""
    second = next(item.run_id for item in events if isinstance(item, StageStarted) and item.stage == "second")

    def running() -> bool:
        control.reconciler.reconcile(second)
        with control.store.snapshot() as session:
            attempt = session.get(Attempt, (second, 1))
        return attempt is not None and attempt.state == "running"

    wait_for(running, "the second stage")
    (machine,) = machines(control)
    assert (machine.run_id, machine.epoch, machine.state) == (second, 1, "ready")
    return second


def test_stages_share_a_machine_and_its_cost(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template
) -> None:
    runs: list[str] = []
    for event in go(control, template, FIRST, SECOND, THIRD):
        if isinstance(event, StageFinished):
            runs.append(event.run_id)
        if isinstance(event, StageStarted):  # the files of finished stages are gone
            assert not list((cloud.folder / "machines").glob("*/home/.perilune/attempts/*/1"))
    (machine,) = machines(control)
    assert len(bill(cloud)["costs"]) == 1 and machine.run_id == runs[2]
    kinds = [event.kind for event in machine_events(control, machine)]
    assert kinds[0] == "machine.requested" and kinds.count("machine.taken_over") == 2
    assert [use.machines for use in attempt_uses(control, runs)] == [1, 1, 1]
    for run_id in runs:
        run = control.run(run_id)
        assert verify(control.directory(run), run.bundle_digest) == []
    all_gone(control, cloud)

    (machine,) = machines(control)
    shares = [use.cost for use in attempt_uses(control, runs)]
    assert all(share is not None and share > 0 for share in shares)
    assert sum(filter(None, shares)) == pytest.approx(accrued_cost(machine))
    with control.store.snapshot() as session:
        assert cost_of_runs(session, runs) == pytest.approx(machine.cost)
        assert cost_of_runs(session, runs[:1]) == pytest.approx(shares[0])


def test_machine_is_kept_only_while_a_process_can_start_the_next_stage(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template
) -> None:
    events = go(control, template, FIRST, SECOND)
    finish_first_stage(events)
    (machine,) = machines(control)
    experiment = control.run(machine.run_id).experiment_id
    other = drill_control(control.home.root)
    for _ in range(3):
        other.reconciler.reconcile_all(act=False)
    assert [row.state for row in machines(control)] == ["ready"] and has_starter(control.home, experiment)

    events.close()  # type: ignore[attr-defined]  # as when the process ends
    assert not has_starter(control.home, experiment)
    all_gone(other, cloud)


def test_each_arm_of_a_sweep_keeps_its_machine(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template, tmp_path: Path
) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(
        "name: two\nmodel: {preset: tiny}\nenvironment: {id: calculator}\nresources: {threads: 1}\nstages:\n"
        "  - {name: first, task: drill, steps: 1}\n  - {name: last, task: drill, data: first, steps: 1}\n"
    )
    runner = SweepRunner(control, template)
    for seed in range(2):
        loaded = load_recipe(path, [f"seed={seed}"])
        runner.submit(open_experiment(control, loaded), loaded)
    while runner.live:
        states = runner.reconcile()
    assert all(state.succeeded for state in states.values()) and len(bill(cloud)["costs"]) == 2
    all_gone(control, cloud)


@pytest.mark.parametrize("desire", [Desire.RELEASED, Desire.COLLECTED])
def test_termination_planned_before_handover_is_dropped(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template, desire: Desire
) -> None:
    """Another process plans to terminate an idle machine, and acts after the handover to the second stage."""
    events = go(control, template, FIRST, HANGING)
    finish_first_stage(events)
    with pytest.MonkeyPatch.context() as patch:

        def late(_: Desire, recorded: RecordedMachine, seen: Sighting, now: Instant) -> Plan:
            patch.undo()
            start_second_on_same_machine(control, events)
            return plan_machine(desire, recorded, seen, now)

        patch.setattr(lifecycle, "plan_machine", late)
        (machine,) = machines(control)
        after = fleet.reconcile(machine.key)
    assert after is not None and after.state == "ready" and after.run_id != machine.run_id
    assert bill(cloud)["alive"] and not after.terminate_calls
    cancel_run(control, after.run_id)
    all_gone(control, cloud)


def test_cancelled_last_stage_releases_shared_machine(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template
) -> None:
    second = start_second_on_same_machine(control, go(control, template, FIRST, HANGING))
    assert cancel_run(control, second).state == "cancelled"
    all_gone(control, cloud)
    assert kinds(control, "machine.")[-1] == "gone"


def test_stage_resumes_on_own_machine_when_shared_lease_ends(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second stage uses up the rest of the lease, then continues on a machine of its own."""
    events = go(control, template, FIRST, HANGING)
    second = start_second_on_same_machine(control, events)
    (machine,) = machines(control)
    checkpoint = control.home.attempt(second, 1) / "artifacts" / "checkpoints" / "step-000002"
    wait_for(lambda: control.reconciler.reconcile(second) and checkpoint.exists(), "the second checkpoint")
    with control.store.transaction() as session:
        session.get_one(Machine, machine.key).lease = LEASE.model_copy(update={"max_cost": 1e-9}).model_dump()
    last = list(events)[-1]
    assert isinstance(last, StageFinished) and last.summary["began_at"] == 2
    with control.store.snapshot() as session:
        ended = session.get_one(Attempt, (second, 1))
    assert (ended.state, ended.cause) == ("lost", "machine_lost") and "max_cost" in ended.message
    assert len(bill(cloud)["costs"]) == 2
    all_gone(control, cloud)


@pytest.mark.parametrize("why", ["half its lease is over", "another kind", "preempted"])
@pytest.mark.parametrize("weather", [Weather(notice_seconds=30.0)])
def test_unsuitable_machine_is_not_handed_over(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template, why: str
) -> None:
    events = go(control, template, FIRST, SECOND)
    finish_first_stage(events)
    (machine,) = machines(control)
    if why == "preempted":
        cloud.inject(key=machine.key, fault=Fault.PREEMPTED, seconds=30.0)
        fleet.reconcile(machine.key)
    else:
        with control.store.transaction() as session:
            row = session.get_one(Machine, machine.key)
            if why == "another kind":
                row.kind = "large"
            else:
                row.leased = {**row.leased, "seconds": row.leased["seconds"] - 0.6 * LEASE.max_lifetime}
    (second,) = runs_of(events)
    assert {row.run_id for row in machines(control)} == {machine.run_id, second}
    all_gone(control, cloud)


@pytest.mark.slow
def test_several_machines_are_handed_over_together(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template
) -> None:
    both = template.model_copy(update={"resources": ResourcesChange(nodes=2)})
    plans = [
        StagePlan(plan.name, both.apply_resources(plan.job.model_copy(update={"task": "gang_drill"})), {})
        for plan in (drill_plan("first", steps=1), drill_plan("second", steps=1))
    ]
    runs = runs_of(go(control, both, *plans))
    assert len(bill(cloud)["costs"]) == 2
    assert [(machine.run_id, machine.rank) for machine in machines(control)] == [(runs[1], 0), (runs[1], 1)]
    all_gone(control, cloud)


@pytest.mark.thorough
@pytest.mark.parametrize("from_the_start", [True, False])
def test_experiment_with_all_commands_killed_leaks_no_machine(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template, tmp_path: Path, from_the_start: bool
) -> None:
    """Kill from the start, or from the second stage while another process keeps the machine of the first."""
    other = go(control, template, FIRST, SECOND)
    if not from_the_start:
        finish_first_stage(other)

    def command() -> None:
        control = drill_control(home)
        list(go(control, template, FIRST, SECOND))
        while control.reconciler.rentals.fleet.machines():
            control.reconciler.reconcile_all()

    home = control.home.root
    points = killed_at_every_point(command, tmp_path / "points")
    assert from_the_start or {*HANDOVER_POINTS, *REMOTE_POINTS} <= set(points)
    with control.store.snapshot() as session:
        runs = {run.stage: run.state for run in session.scalars(select(Run))}
        assert {operation.status for operation in session.scalars(select(Operation))} == {"done"}
    assert runs == {"first": "succeeded", "second": "succeeded"}
    assert bill(cloud)["alive"] == [] and len(bill(cloud)["costs"]) == (2 if from_the_start else 1)
