"""Runs on rented machines: from a template to evidence at home, while machines are taken away and die."""

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cloud_cases import LEASE, all_gone, bill, rented_template
from drill_cases import PATIENCE, begin, drill_control, drill_plan, only_run, wait_for
from sqlalchemy import select

from perilune.bundle.verify import verify
from perilune.control.machines.budget import DAY, today
from perilune.control.machines.lifecycle import Fleet
from perilune.control.machines.panic import allow_renting, panic
from perilune.control.queries.explanation import explain
from perilune.control.queries.lookup import attempts_of, placed_attempts
from perilune.control.record.store import Attempt, Event, Machine
from perilune.control.record.transitions import RunState
from perilune.control.runs import endings
from perilune.control.runs.experiments import Control, StagePlan, advance
from perilune.control.runs.progress import StageEvent, StageFailed, StageFinished, StageProgress, StageStarted
from perilune.control.runs.requests import cancel, request_cancel
from perilune.control.runs.templates import OnRented, Template
from perilune.execution.claim import read_claim
from perilune.execution.providers.fake.client import FakeCloud
from perilune.execution.providers.fake.weather import Fault, Weather
from perilune.ui.overview import facts_of, placements_of
from perilune.ui.provenance import provenance_of
from perilune.ui.view import ExperimentView, StageView


@pytest.fixture
def template(tmp_path: Path) -> Template:
    return rented_template(tmp_path / "python")


def go(control: Control, template: Template, plan: StagePlan) -> Iterator[StageEvent]:
    return advance(control, begin(control, [plan]), [plan], template=template, poll=0.05)


def state_of(control: Control, state: str) -> str:
    """Reconcile until the first attempt is in that state; the run's id."""
    deadline = time.monotonic() + PATIENCE
    while not (found := attempts(control)) or found[0].state != state:
        assert time.monotonic() < deadline, f"{found and found[0].state} is not {state}"
        control.reconciler.all()
        time.sleep(0.05)
    return found[0].run_id


def at_first_progress(events: Iterator[StageEvent]) -> None:
    assert any(isinstance(event, StageProgress) for event in events)


def attempts(control: Control) -> list[Attempt]:
    with control.store.snapshot() as session:
        return list(session.scalars(select(Attempt).order_by(Attempt.number)))


def ends(control: Control) -> list[tuple[str, str]]:
    return [(one.state, one.cause) for one in attempts(control)]


def looked_at(control: Control) -> Attempt:
    """The last attempt, after a look at everything."""
    control.reconciler.look_now(attempts(control)[-1].run_id)
    control.reconciler.all()
    return attempts(control)[-1]


def hanging(control: Control, template: Template) -> Iterator[StageEvent]:
    """The events to come of a run that hangs at its third step, and whose second checkpoint is home."""
    events = go(control, template, drill_plan(steps=4, fail_at=2, how="hang", fresh_only=True))
    at_first_progress(events)
    run = only_run(control)
    second = control.directory(run) / "artifacts" / "checkpoints" / "step-000002"
    wait_for(lambda: control.reconciler.one(run.id) and second.exists(), "its second checkpoint")
    return events


def cost_of_the_day(fleet: Fleet) -> float:
    return today(fleet.all(gone=True))


def test_a_run_waits_for_the_days_budget_has_a_machine_and_gives_it_back(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template
) -> None:
    providers = control.home.root / "providers.yaml"
    enough = providers.read_text()
    providers.write_text(enough.replace("daily_cap: 100.0", "daily_cap: 0.01"))
    events = go(control, template, drill_plan(steps=3))
    next(events)
    assert state_of(control, "planned")
    (attempt,) = attempts(control)
    assert "daily cap" in attempt.message and not bill(cloud)["costs"]
    assert any("daily cap" in fact for fact in explain(control, attempt.run_id).because)
    providers.write_text(enough)

    cloud.inject(call="terminate", fault=Fault.ERROR_BEFORE, times=10**6)
    last = list(events)[-1]
    assert isinstance(last, StageFinished) and last.summary["total"] == 12
    run = only_run(control)
    (attempt,) = attempts(control)
    assert (attempt.placement, attempt.state, attempt.message) == ("fake:small", "succeeded", "")
    assert verify(control.directory(run), run.bundle_digest) == []  # the evidence is at home
    assert [one.state for one in fleet.all()] == ["terminating"] and bill(cloud)["alive"]
    cloud.inject(call="terminate", fault=Fault.ERROR_BEFORE, times=0)
    all_gone(control, cloud)
    assert control.run(run.id).state == "succeeded"
    with control.store.snapshot() as session:
        states = session.scalars(select(Event.kind).where(Event.kind.startswith("attempt.")))
        ordered = [kind.removeprefix("attempt.") for kind in states]
    assert ordered[:4] == ["planned", "provisioning", "staging", "starting"]


@pytest.mark.thorough
@pytest.mark.parametrize("weather", [Weather(notice_seconds=30.0)])
def test_a_cut_link_ends_nothing_and_a_notice_costs_no_finished_step(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template
) -> None:
    template = template.model_copy(update={"bring": "final"})  # until the machine is about to go
    events = go(control, template, drill_plan(steps=4, fail_at=2, how="hang", fresh_only=True))
    at_first_progress(events)
    run = only_run(control)
    key = fleet.key(run.id, 1)
    cloud.inject(key=key, fault=Fault.LINK_CUT, seconds=1.5)
    cloud.inject(call="list", fault=Fault.ERROR_BEFORE, times=3)
    deadline = time.monotonic() + PATIENCE
    for wanted in ("unreachable", "reachable"):
        while attempts(control)[0].reachability != wanted:
            assert time.monotonic() < deadline
            control.reconciler.all()
            time.sleep(0.05)
        assert attempts(control)[0].state == "running"
    cloud.inject(key=key, fault=Fault.PREEMPTED, seconds=30.0)
    last = list(events)[-1]
    assert isinstance(last, StageFinished) and last.summary["began_at"] == 2
    assert [one.state for one in attempts(control)] == ["preempted", "succeeded"]
    all_gone(control, cloud)

    stage = StageView(run.stage, run.task, run.id, "succeeded", control.directory(run))
    view = ExperimentView("drill", 0, "", (stage,), tuple(placed_attempts(control, [run.id])))
    first, second = placements_of(view)
    assert (first.placement, first.attempt, first.state) == ("fake:small", 1, "preempted")
    assert (second.attempt, second.state, second.machines) == (2, "succeeded", 1)
    machines = {one.epoch: one for one in fleet.all(gone=True)}
    assert (first.cost, second.cost) == (machines[1].cost, machines[2].cost)
    assert facts_of(view, [], provenance_of(view, []))[0][:2] == ("Cost", f"{first.cost + second.cost:.4f}")


def test_a_machine_that_dies_costs_what_had_not_come_home(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template
) -> None:
    events = hanging(control, template)
    run = only_run(control)
    cloud.inject(key=fleet.key(run.id, 1), fault=Fault.HOST_DEATH)
    last = list(events)[-1]
    assert isinstance(last, StageFinished) and last.summary["began_at"] == 2
    assert ends(control) == [("lost", "machine_lost"), ("succeeded", "")]
    all_gone(control, cloud)


@pytest.mark.thorough
def test_a_machine_that_dies_before_its_evidence_is_home_is_lost_and_its_run_done_again(
    control: Control,
    fleet: Fleet,
    cloud: FakeCloud,
    template: Template,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once when nobody had seen its end yet, once when the end was seen and nothing had come."""
    events = go(control, template, drill_plan(steps=1, noise=True, gate=str(tmp_path / "gate")))
    next(events)
    run_id = state_of(control, "running")
    (tmp_path / "gate").touch()
    finished = "*/home/.perilune/attempts/**/runtime/result.json"
    wait_for(lambda: any((cloud.folder / "machines").glob(finished)), "its end, at which nobody looks")
    cloud.inject(key=fleet.key(run_id, 1), fault=Fault.HOST_DEATH)

    def die_seen(point: str) -> None:
        if point == "finalize.begun" and control.run(run_id).current_epoch == 2:
            cloud.inject(key=fleet.key(run_id, 2), fault=Fault.HOST_DEATH)

    monkeypatch.setattr(endings, "reached", die_seen)
    assert isinstance(list(events)[-1], StageFinished)
    assert ends(control) == [("lost", "machine_lost")] * 2 + [("succeeded", "")]
    *lost, third = attempts(control)
    assert [one.manifest_digest for one in lost] == [None, None]  # how they ended, nobody knows
    assert control.run(run_id).manifest_digest == third.manifest_digest
    all_gone(control, cloud)


@pytest.mark.thorough
def test_leaps_of_the_wall_clock_end_hurry_and_delay_nothing(
    control: Control,
    fleet: Fleet,
    cloud: FakeCloud,
    template: Template,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wall, leap = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: wall() + leap[0])
    events = hanging(control, template)
    run_id = only_run(control).id
    spent = cost_of_the_day(fleet)
    for days in (1, -1, 0):  # seen, unseen and seen again
        cloud.inject(key=fleet.key(run_id, 1), fault=Fault.LINK_CUT, seconds=0.6)
        for wanted in ("unreachable", "reachable"):
            leap[0] = DAY * days
            wait_for(lambda wanted=wanted: looked_at(control).reachability == wanted, wanted)
            assert ends(control) == [("running", "")]
            assert cost_of_the_day(fleet) == pytest.approx(spent)
    leap[0] = DAY
    os.kill(read_claim(control.directory(only_run(control)) / "runtime").pid, signal.SIGKILL)  # type: ignore[union-attr]
    wait_for(lambda: control.reconciler.all(act=False) and control.run(run_id).state == "queued", "its death")
    leap[0] = 0.0  # now it is to be tried again tomorrow, if that clock is asked
    assert control.run(run_id).not_before > time.time() + DAY / 2
    assert "may start, and no command" in " ".join(explain(control, run_id).because)
    assert isinstance(list(events)[-1], StageFinished)
    assert ends(control) == [("failed", "runner_died"), ("succeeded", "")]
    leap[0] = -DAY
    all_gone(control, cloud)


@pytest.mark.parametrize("when", ["requested", "running"])
def test_cancelling_ends_the_machine(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template, when: str
) -> None:
    if when == "requested":
        cloud.inject(call="create", fault=Fault.ERROR_BEFORE, times=1000)
    events = go(control, template, drill_plan(fail_at=1, how="hang"))
    next(events)
    run_id = state_of(control, "provisioning" if when == "requested" else "running")
    assert cancel(control, run_id).state == "cancelled"
    all_gone(control, cloud)


def test_what_cannot_be_rented_says_so(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template
) -> None:
    assert isinstance(template.placement, OnRented)
    huge = template.model_copy(update={"placement": template.placement.model_copy(update={"kind": "huge"})})
    last = list(go(control, huge, drill_plan()))[-1]
    assert isinstance(last, StageFailed) and last.cause == "host_refused"
    assert "no machine of kind 'huge'" in last.message and not fleet.all(gone=True)

    place = template.placement.model_copy(update={"provider": "nobody"})
    nobody = template.model_copy(update={"placement": place})
    last = list(go(control, nobody, drill_plan(steps=1)))[-1]
    assert isinstance(last, StageFailed) and "no provider is called 'nobody'" in last.message

    cloud.inject(call="list", fault=Fault.ERROR_BEFORE, times=10**6)
    started = next(go(control, template, drill_plan(steps=2)))
    assert isinstance(started, StageStarted)
    assert control.reconciler.one(started.run_id).state == "queued"
    assert "waits for its provider" in explain(control, started.run_id).because[-1]


def test_a_lease_that_is_over_ends_the_run(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template
) -> None:
    assert isinstance(template.placement, OnRented)
    lease = LEASE.model_copy(update={"max_cost": 0.4 / 3600 * 6})
    short = template.model_copy(update={"placement": template.placement.model_copy(update={"lease": lease})})
    last = list(go(control, short, drill_plan(fail_at=1, how="hang")))[-1]
    assert isinstance(last, StageFailed) and last.cause in {"lease_ended", "no_machine"}
    all_gone(control, cloud)
    assert all(cost <= lease.max_cost * 1.5 for cost in bill(cloud)["costs"].values())


def test_who_follows_a_run_sees_the_machines_of_earlier_stages_gone(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template
) -> None:
    plans = [drill_plan("first", steps=1), drill_plan("second", steps=3, seconds=0.5)]
    events = advance(control, begin(control, plans), plans, template=template, poll=0.05)
    (first,) = itertools.islice((event.run_id for event in events if isinstance(event, StageFinished)), 1)
    with control.store.transaction() as session:  # which the second stage does not fit
        session.get_one(Machine, fleet.key(first, 1)).lease = LEASE.model_copy(
            update={"idle": 1e-3}
        ).model_dump()
    (second,) = (event.run_id for event in events if isinstance(event, StageFinished))
    states = {one.run_id: one.state for one in fleet.all(gone=True)}
    assert states[first] == "gone" and second in states


def test_a_panic_stops_what_wants_machines_until_it_is_lifted(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template
) -> None:
    """One run has a machine, one is about to have one, one is submitted later: none gets any."""
    plans = [
        drill_plan(f"run{number}", steps=1, fail_at=0, how="hang", fresh_only=True) for number in range(3)
    ]
    started = [next(go(control, template, plan)).run_id for plan in plans[:2]]
    wait_for(lambda: control.reconciler.one(started[0]) and attempts_of(control, started[0]), "an attempt")
    state_of(control, "running")
    assert panic(control.home, 30.0).complete
    made = set(bill(cloud)["costs"])
    started.append(next(go(control, template, plans[2])).run_id)

    later = drill_control(control.home.root)  # another process, as a daemon that is started anew
    for _ in range(20):
        for one in (control, later):
            one.reconciler.all()
    assert set(bill(cloud)["costs"]) == made and not bill(cloud)["alive"] and not fleet.all()
    for run_id in started:
        assert not RunState(control.run(run_id).state).terminal
        told = explain(control, run_id)
        assert "`perilune panic` has stopped renting" in " ".join(told.because)
        assert "perilune panic --lift" in told.commands
        request_cancel(control, run_id) if run_id != started[0] else None
    assert allow_renting(control.home) and not allow_renting(control.home)
    wait_for(lambda: later.reconciler.all() and set(bill(cloud)["costs"]) > made, "a new machine")
    request_cancel(later, started[0])  # the new machine may not answer yet, which `cancel` reports
    wait_for(lambda: RunState(later.reconciler.one(started[0]).state).terminal, "the end of the run")
    all_gone(later, cloud)
    later.store.close()
