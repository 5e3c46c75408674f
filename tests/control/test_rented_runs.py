"""Runs on rented machines: preemptions, dead machines, cut links, ended leases, clock jumps and panic."""

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cloud_cases import LEASE, all_gone, bill, rented_template
from drill_cases import (
    PATIENCE,
    attempts,
    begin,
    drill_control,
    drill_plan,
    only_run,
    wait_for,
    wait_for_progress,
    wait_for_second_checkpoint,
)
from sqlalchemy import select

from perilune.bundle.verify import verify
from perilune.control.machines.budget import DAY_S, cost_today
from perilune.control.machines.lifecycle import Fleet
from perilune.control.machines.panic import allow_renting, panic
from perilune.control.queries.explanation import explain_run
from perilune.control.queries.lookup import attempt_uses, list_attempts
from perilune.control.record.store import Attempt, Event, Machine
from perilune.control.record.transitions import RunState
from perilune.control.runs import endings
from perilune.control.runs.experiments import Control, StagePlan, advance
from perilune.control.runs.progress import StageEvent, StageFailed, StageFinished, StageStarted
from perilune.control.runs.requests import cancel_run, request_cancel
from perilune.control.runs.templates import RentedTarget, Template
from perilune.execution.claim import read_claim
from perilune.execution.providers.fake.client import FakeCloud
from perilune.execution.providers.fake.weather import Fault, Weather
from perilune.ui.overview import list_facts, list_placements
from perilune.ui.provenance import collect_provenance
from perilune.ui.view import ExperimentView, StageView


@pytest.fixture
def template(tmp_path: Path) -> Template:
    return rented_template(tmp_path / "python")


def go(control: Control, template: Template, plan: StagePlan) -> Iterator[StageEvent]:
    return advance(control, begin(control, [plan]), [plan], template=template, poll=0.05)


def run_in_state(control: Control, state: str) -> str:
    """Reconcile until the first attempt is in this state; return the run id."""
    deadline = time.monotonic() + PATIENCE
    while not (rows := attempts(control)) or rows[0].state != state:
        assert time.monotonic() < deadline, f"{rows and rows[0].state} is not {state}"
        control.reconciler.reconcile_all()
        time.sleep(0.05)
    return rows[0].run_id


def ends(control: Control) -> list[tuple[str, str]]:
    return [(attempt.state, attempt.cause) for attempt in attempts(control)]


def observe_now(control: Control) -> Attempt:
    """Observe everything now; return the last attempt."""
    control.reconciler.reset_backoff(attempts(control)[-1].run_id)
    control.reconciler.reconcile_all()
    return attempts(control)[-1]


def hanging(control: Control, template: Template) -> Iterator[StageEvent]:
    """Start a run that hangs at its third step; return its events after the second checkpoint is fetched."""
    events = go(control, template, drill_plan(steps=4, fail_at=2, how="hang", fresh_only=True))
    wait_for_progress(events)
    wait_for_second_checkpoint(control)
    return events


def cost_of_the_day(fleet: Fleet) -> float:
    return cost_today(fleet.machines(include_gone=True))


def test_run_waits_for_daily_cap_and_succeeds_despite_failed_cleanup(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template
) -> None:
    providers = control.home.root / "providers.yaml"
    enough = providers.read_text()
    providers.write_text(enough.replace("daily_cap: 100.0", "daily_cap: 0.01"))
    events = go(control, template, drill_plan(steps=3))
    next(events)
    assert run_in_state(control, "planned")
    (attempt,) = attempts(control)
    assert "daily cap" in attempt.message and not bill(cloud)["costs"]
    assert any("daily cap" in fact for fact in explain_run(control, attempt.run_id).because)
    providers.write_text(enough)

    cloud.inject(call="terminate", fault=Fault.ERROR_BEFORE, times=10**6)
    last = list(events)[-1]
    assert isinstance(last, StageFinished) and last.summary["total"] == 12
    run = only_run(control)
    (attempt,) = attempts(control)
    assert (attempt.placement, attempt.state, attempt.message) == ("fake:small", "succeeded", "")
    assert verify(control.directory(run), run.bundle_digest) == []  # collected
    assert [machine.state for machine in fleet.machines()] == ["terminating"] and bill(cloud)["alive"]
    cloud.inject(call="terminate", fault=Fault.ERROR_BEFORE, times=0)
    all_gone(control, cloud)
    assert control.run(run.id).state == "succeeded"
    with control.store.snapshot() as session:
        states = session.scalars(select(Event.kind).where(Event.kind.startswith("attempt.")))
        kinds = [kind.removeprefix("attempt.") for kind in states]
    ordered = [kind for kind in kinds if kind not in ("unreachable", "reachable")]  # a busy machine
    assert ordered[:4] == ["planned", "provisioning", "staging", "starting"]


@pytest.mark.thorough
@pytest.mark.parametrize("weather", [Weather(notice_seconds=30.0)])
def test_run_survives_cut_link_and_resumes_after_preemption_notice(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template
) -> None:
    template = template.model_copy(update={"bring": "final"})  # until the preemption notice
    events = go(control, template, drill_plan(steps=4, fail_at=2, how="hang", fresh_only=True))
    wait_for_progress(events)
    run = only_run(control)
    key = fleet.machine_key(run.id, 1)
    cloud.inject(key=key, fault=Fault.LINK_CUT, seconds=1.5)
    cloud.inject(call="list", fault=Fault.ERROR_BEFORE, times=3)
    deadline = time.monotonic() + PATIENCE
    for wanted in ("unreachable", "reachable"):
        while attempts(control)[0].reachability != wanted:
            assert time.monotonic() < deadline
            control.reconciler.reconcile_all()
            time.sleep(0.05)
        assert attempts(control)[0].state == "running"
    cloud.inject(key=key, fault=Fault.PREEMPTED, seconds=30.0)
    last = list(events)[-1]
    assert isinstance(last, StageFinished) and last.summary["began_at"] == 2
    assert [attempt.state for attempt in attempts(control)] == ["preempted", "succeeded"]
    all_gone(control, cloud)

    stage = StageView(run.stage, run.task, run.id, "succeeded", control.directory(run))
    view = ExperimentView("drill", 0, "", (stage,), tuple(attempt_uses(control, [run.id])))
    first, second = list_placements(view)
    assert (first["placement"], first["number"], first["state"]) == ("fake:small", 1, "preempted")
    assert (second["number"], second["state"], second["machines"]) == (2, "succeeded", 1)
    machines = {machine.epoch: machine for machine in fleet.machines(include_gone=True)}
    assert (first["cost"], second["cost"]) == (machines[1].cost, machines[2].cost)
    assert list_facts(view, [], collect_provenance(view, []))[0][:2] == (
        "Cost",
        f"{first['cost'] + second['cost']:.4f}",
    )


def test_run_resumes_from_fetched_checkpoint_after_machine_death(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template
) -> None:
    events = hanging(control, template)
    run = only_run(control)
    cloud.inject(key=fleet.machine_key(run.id, 1), fault=Fault.HOST_DEATH)
    last = list(events)[-1]
    assert isinstance(last, StageFinished) and last.summary["began_at"] == 2
    assert ends(control) == [("lost", "machine_lost"), ("succeeded", "")]
    all_gone(control, cloud)


@pytest.mark.thorough
def test_attempt_is_lost_when_machine_dies_before_collection(
    control: Control,
    fleet: Fleet,
    cloud: FakeCloud,
    template: Template,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first machine dies before its end is observed, the second after that but before collection."""
    events = go(control, template, drill_plan(steps=1, noise=True, gate=str(tmp_path / "gate")))
    next(events)
    run_id = run_in_state(control, "running")
    (tmp_path / "gate").touch()
    finished = "*/home/.perilune/attempts/**/runtime/result.json"
    wait_for(lambda: any((cloud.folder / "machines").glob(finished)), "the unobserved end")
    cloud.inject(key=fleet.machine_key(run_id, 1), fault=Fault.HOST_DEATH)

    def kill_after_observed_end(point: str) -> None:
        if point == "finalize.begun" and control.run(run_id).current_epoch == 2:
            cloud.inject(key=fleet.machine_key(run_id, 2), fault=Fault.HOST_DEATH)

    monkeypatch.setattr(endings, "kill_point", kill_after_observed_end)
    assert isinstance(list(events)[-1], StageFinished)
    assert ends(control) == [("lost", "machine_lost")] * 2 + [("succeeded", "")]
    *lost, third = attempts(control)
    assert [attempt.manifest_digest for attempt in lost] == [None, None]  # their outcome is unknown
    assert control.run(run_id).manifest_digest == third.manifest_digest
    all_gone(control, cloud)


@pytest.mark.thorough
def test_wall_clock_jumps_do_not_affect_runs_or_costs(
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
    for days in (1, -1, 0):  # each link cut and restored
        cloud.inject(key=fleet.machine_key(run_id, 1), fault=Fault.LINK_CUT, seconds=0.6)
        for wanted in ("unreachable", "reachable"):
            leap[0] = DAY_S * days
            wait_for(lambda wanted=wanted: observe_now(control).reachability == wanted, wanted)
            assert ends(control) == [("running", "")]
            assert cost_of_the_day(fleet) == pytest.approx(spent)
    leap[0] = DAY_S
    os.kill(read_claim(control.directory(only_run(control)) / "runtime").pid, signal.SIGKILL)  # type: ignore[union-attr]
    wait_for(
        lambda: control.reconciler.reconcile_all(act=False) and control.run(run_id).state == "queued",
        "the recorded death",
    )
    leap[0] = 0.0  # by the wall clock, the retry is now due tomorrow
    assert control.run(run_id).not_before > time.time() + DAY_S / 2
    assert "attempt 2 is about to start" in " ".join(explain_run(control, run_id).because)
    assert isinstance(list(events)[-1], StageFinished)
    assert ends(control) == [("failed", "runner_died"), ("succeeded", "")]
    leap[0] = -DAY_S
    all_gone(control, cloud)


@pytest.mark.parametrize("when", ["requested", "running"])
def test_cancel_terminates_machine(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template, when: str
) -> None:
    if when == "requested":
        cloud.inject(call="create", fault=Fault.ERROR_BEFORE, times=1000)
    events = go(control, template, drill_plan(fail_at=1, how="hang"))
    next(events)
    run_id = run_in_state(control, "provisioning" if when == "requested" else "running")
    assert cancel_run(control, run_id).state == "cancelled"
    all_gone(control, cloud)


def test_unavailable_machine_kind_or_provider_is_reported(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template
) -> None:
    assert isinstance(template.placement, RentedTarget)
    huge = template.model_copy(update={"placement": template.placement.model_copy(update={"kind": "huge"})})
    last = list(go(control, huge, drill_plan()))[-1]
    assert isinstance(last, StageFailed) and last.cause == "host_refused"
    assert "no machine of kind 'huge'" in last.message and not fleet.machines(include_gone=True)

    target = template.placement.model_copy(update={"provider": "nobody"})
    nobody = template.model_copy(update={"placement": target})
    last = list(go(control, nobody, drill_plan(steps=1)))[-1]
    assert isinstance(last, StageFailed) and "no provider is called 'nobody'" in last.message

    cloud.inject(call="list", fault=Fault.ERROR_BEFORE, times=10**6)
    started = next(go(control, template, drill_plan(steps=2)))
    assert isinstance(started, StageStarted)
    assert control.reconciler.reconcile(started.run_id).state == "queued"
    assert "waits for its provider" in explain_run(control, started.run_id).because[-1]


def test_refused_machine_is_reported_after_a_kill_in_between(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(template.placement, RentedTarget)
    huge = template.model_copy(update={"placement": template.placement.model_copy(update={"kind": "huge"})})
    events = go(control, huge, drill_plan())
    next(events)

    def die(*_: object) -> bool:
        raise SystemExit("killed before the attempt has ended")

    with monkeypatch.context() as patch:
        patch.setattr(control.reconciler.rentals, "_end", die)
        with pytest.raises(SystemExit):
            run_in_state(control, "failed")
    assert attempts(control)[0].state == "provisioning"
    last = list(events)[-1]
    assert isinstance(last, StageFailed) and last.cause == "host_refused"


def test_run_fails_when_its_lease_ends(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template
) -> None:
    assert isinstance(template.placement, RentedTarget)
    lease = LEASE.model_copy(update={"max_cost": 0.4 / 3600 * 6})
    short = template.model_copy(update={"placement": template.placement.model_copy(update={"lease": lease})})
    last = list(go(control, short, drill_plan(fail_at=1, how="hang")))[-1]
    assert isinstance(last, StageFailed) and last.cause in {"lease_ended", "no_machine"}
    all_gone(control, cloud)
    assert all(cost <= lease.max_cost * 1.5 for cost in bill(cloud)["costs"].values())


def test_advance_terminates_idle_machines_of_finished_stages(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template
) -> None:
    plans = [drill_plan("first", steps=1), drill_plan("second", steps=3, seconds=0.5)]
    events = advance(control, begin(control, plans), plans, template=template, poll=0.05)
    (first,) = itertools.islice((event.run_id for event in events if isinstance(event, StageFinished)), 1)
    with control.store.transaction() as session:  # too short for the second stage
        session.get_one(Machine, fleet.machine_key(first, 1)).lease = LEASE.model_copy(
            update={"idle": 1e-3}
        ).model_dump()
    (second,) = (event.run_id for event in events if isinstance(event, StageFinished))
    states = {machine.run_id: machine.state for machine in fleet.machines(include_gone=True)}
    assert states[first] == "gone" and second in states


def test_panic_stops_renting_until_lifted(
    control: Control, fleet: Fleet, cloud: FakeCloud, template: Template
) -> None:
    """One run has a machine, one is about to get one, one is submitted later: after panic, none gets one."""
    plans = [
        drill_plan(f"run{number}", steps=1, fail_at=0, how="hang", fresh_only=True) for number in range(3)
    ]
    started = [next(go(control, template, plan)).run_id for plan in plans[:2]]
    wait_for(
        lambda: control.reconciler.reconcile(started[0]) and list_attempts(control, started[0]), "an attempt"
    )
    run_in_state(control, "running")
    assert panic(control.home, 30.0).complete
    made = set(bill(cloud)["costs"])
    started.append(next(go(control, template, plans[2])).run_id)

    later = drill_control(control.home.root)  # another process, like a restarted daemon
    for _ in range(20):
        for each in (control, later):
            each.reconciler.reconcile_all()
    assert set(bill(cloud)["costs"]) == made and not bill(cloud)["alive"] and not fleet.machines()
    for run_id in started:
        assert not RunState(control.run(run_id).state).is_terminal
        answer = explain_run(control, run_id)
        assert "`perilune panic` has stopped renting" in " ".join(answer.because)
        assert "perilune panic --lift" in answer.commands
        request_cancel(control, run_id) if run_id != started[0] else None
    assert allow_renting(control.home) and not allow_renting(control.home)
    wait_for(lambda: later.reconciler.reconcile_all() and set(bill(cloud)["costs"]) > made, "a new machine")
    request_cancel(later, started[0])  # the new machine may not answer yet, which `cancel` reports
    wait_for(lambda: RunState(later.reconciler.reconcile(started[0]).state).is_terminal, "the end of the run")
    all_gone(later, cloud)
    later.store.close()
