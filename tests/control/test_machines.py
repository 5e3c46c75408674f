"""Rented machines of the fake cloud, over HTTP: failing calls, lost responses and dying machines."""

import multiprocessing
import os
import shutil
import signal
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from cloud_cases import LEASE, SMALL, bill, end, life_of_a_machine, rent_from, rented, tend_until
from drill_cases import drill_control
from fault_points import MACHINE_POINTS
from sqlalchemy import select

from perilune.control.machines.budget import (
    accrued_cost,
    cost_today,
    find_cap_problem,
    query_price,
    remaining_cost,
)
from perilune.control.machines.lifecycle import Fleet
from perilune.control.machines.panic import panic
from perilune.control.machines.providers import cluster_id
from perilune.control.machines.sweep import terminate_unrecorded
from perilune.control.record import clock
from perilune.control.record.clock import Instant
from perilune.control.record.faults import KILL_AT
from perilune.control.record.home import Home
from perilune.control.record.store import Attempt, Event, Machine, Operation, verify_events
from perilune.control.record.transitions import Cleanup, MachineState
from perilune.control.runs.experiments import Control
from perilune.errors import PeriluneError
from perilune.execution.providers.fake.client import FakeCloud
from perilune.execution.providers.fake.weather import Fault, Weather
from perilune.execution.providers.protocol import MachineRequest, MachineStatus

GONE, READY, TERMINATING = MachineState.GONE, MachineState.READY, MachineState.TERMINATING


def kinds(control: Control) -> list[str]:
    with control.store.snapshot() as session:
        assert verify_events(session) is None
        return list(session.scalars(select(Event.kind).order_by(Event.seq)))


def test_machine_lifecycle_from_request_to_termination(
    control: Control, fleet: Fleet, cloud: FakeCloud
) -> None:
    assert query_price(fleet.providers, SMALL) == 0.4
    key = rented(control, fleet)
    ready = tend_until(fleet, key, READY)
    assert ready.remote_id and bill(cloud)["alive"] == [key]
    end(control, collected=False)
    tend_until(fleet, key, MachineState.DRAINING)
    assert bill(cloud)["alive"] == [key]  # its files are not collected yet
    assert accrued_cost(ready) > 0
    with control.store.transaction() as session:
        session.get_one(Attempt, ("01RUN", 1)).cleanup = Cleanup.DONE.value
    gone = tend_until(fleet, key, GONE)
    assert bill(cloud)["alive"] == [] and gone.ended
    assert gone.cost == pytest.approx(bill(cloud)["costs"][key], abs=1e-4)
    assert [kind for kind in kinds(control) if kind.startswith(("machine", "create", "terminate"))] == [
        "machine.requested", "create.intended", "create.done", "machine.created", "machine.ready",
        "machine.draining", "machine.terminating", "terminate.intended", "machine.terminate_requested",
        "machine.missing", "machine.gone", "terminate.done",
    ]  # fmt: skip
    with control.store.snapshot() as session:
        assert {operation.status for operation in session.scalars(select(Operation))} == {"done"}


@pytest.mark.parametrize("billed", [-1e9, float("nan")])
def test_invalid_billed_seconds_never_make_cost_negative(
    control: Control, fleet: Fleet, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch, billed: float
) -> None:
    real = FakeCloud.list
    monkeypatch.setattr(
        FakeCloud,
        "list",
        lambda self, tag: [replace(machine, billed_seconds=billed) for machine in real(self, tag)],
    )
    key = rented(control, fleet)
    tend_until(fleet, key, READY)
    end(control)
    assert tend_until(fleet, key, GONE).cost >= 0.0


@pytest.mark.parametrize("fault", [Fault.LOST_ANSWER, Fault.ERROR_AFTER])
def test_machine_is_adopted_when_create_response_is_lost(
    control: Control, fleet: Fleet, cloud: FakeCloud, fault: Fault
) -> None:
    cloud.inject(call="create", fault=fault, times=1)
    key = rented(control, fleet)
    tend_until(fleet, key, READY)
    assert list(bill(cloud)["costs"]) == [key]
    assert "machine.create_unanswered" in kinds(control)
    end(control)
    tend_until(fleet, key, GONE)
    assert not bill(cloud)["alive"]


@pytest.mark.parametrize("weather", [Weather(late_seconds=0.6)])
@pytest.mark.parametrize("needed", [True, False], ids=["adopted", "reaped"])
def test_machine_created_late_is_adopted_or_terminated(
    control: Control, fleet: Fleet, cloud: FakeCloud, needed: bool
) -> None:
    cloud.inject(call="create", fault=Fault.LATE_EFFECT, times=1)
    key = rented(control, fleet)
    fleet.reconcile(key)
    if needed:
        tend_until(fleet, key, READY)
        end(control)
    else:
        end(control)
        tend_until(fleet, key, GONE)  # two observations did not show it
        deadline = time.monotonic() + 60
        while not terminate_unrecorded(fleet):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "machine.terminating" in kinds(control)
    tend_until(fleet, key, GONE)
    assert list(bill(cloud)["costs"]) == [key] and not bill(cloud)["alive"]


def test_terminate_is_repeated_until_machine_is_gone(
    control: Control, fleet: Fleet, cloud: FakeCloud
) -> None:
    key = rented(control, fleet)
    tend_until(fleet, key, READY)
    cloud.inject(call="terminate", fault=Fault.ERROR_BEFORE, times=5)
    end(control)
    deadline = time.monotonic() + 60
    while (machine := fleet.reconcile(key)) and machine.terminate_calls < 5:
        assert machine.state == TERMINATING and bill(cloud)["alive"] == [key] and accrued_cost(machine) > 0
        assert time.monotonic() < deadline
        time.sleep(0.06)
    tend_until(fleet, key, GONE)
    assert not bill(cloud)["alive"]


def test_cancel_in_every_state_leaves_no_machine(control: Control, fleet: Fleet, cloud: FakeCloud) -> None:
    untouched = rented(control, fleet, number=1)
    end(control, number=1)
    asked = rented(control, fleet, number=2)
    fleet.reconcile(asked)
    end(control, number=2)
    unanswered = rented(control, fleet, number=3)
    cloud.inject(call="create", fault=Fault.LOST_ANSWER, times=1)
    fleet.reconcile(unanswered)
    end(control, number=3)
    ready = rented(control, fleet, number=4)
    tend_until(fleet, ready, READY)
    end(control, number=4)
    for key in (untouched, asked, unanswered, ready):
        tend_until(fleet, key, GONE)
    assert not bill(cloud)["alive"] and untouched not in bill(cloud)["costs"]


@pytest.mark.parametrize("weather", [Weather(notice_seconds=0.5)])
def test_preempted_machine_is_drained_then_gone(control: Control, fleet: Fleet, cloud: FakeCloud) -> None:
    key = rented(control, fleet)
    tend_until(fleet, key, READY)
    cloud.inject(key=key, fault=Fault.PREEMPTED, seconds=0.5)
    assert tend_until(fleet, key, MachineState.DRAINING).notice
    assert tend_until(fleet, key, GONE).reason == "preempted"


def test_dead_machine_is_gone_after_two_observations(
    control: Control, fleet: Fleet, cloud: FakeCloud
) -> None:
    key = rented(control, fleet)
    machine = tend_until(fleet, key, READY)
    alive = cloud.find(key).machine
    assert alive is not None
    host = cloud.host(alive)
    cloud.inject(key=key, fault=Fault.HOST_DEATH)
    with pytest.raises(PeriluneError, match="cannot be reached"):
        host.run(["true"])
    machine = fleet.reconcile(key)
    assert machine is not None and machine.state == READY and machine.missing_since
    assert tend_until(fleet, key, GONE).reason == "host failure"


def test_removed_provider_counts_as_unreachable(control: Control, fleet: Fleet, cloud: FakeCloud) -> None:
    key = rented(control, fleet)
    tend_until(fleet, key, READY)
    providers = control.home.root / "providers.yaml"
    whole = providers.read_text()
    providers.write_text("daily_cap: 1.0\nproviders: {}\n")
    stranger = Fleet(control.home, control.store)
    end(control)
    machine = stranger.reconcile(key)
    assert machine is not None and machine.state == TERMINATING and machine.unseen_since
    providers.write_text(whole)
    tend_until(Fleet(control.home, control.store), key, GONE)


def test_unreachable_provider_is_recorded_and_machine_is_kept(
    control: Control, fleet: Fleet, cloud: FakeCloud
) -> None:
    key = rented(control, fleet)
    tend_until(fleet, key, READY)
    cloud.inject(call="list", fault=Fault.ERROR_BEFORE, times=3)
    for _ in range(3):
        machine = fleet.reconcile(key)
        assert machine is not None and machine.state == READY and machine.unseen_since
    machine = fleet.reconcile(key)
    assert machine is not None and machine.unseen_since is None and bill(cloud)["alive"] == [key]
    changes = [kind for kind in kinds(control) if kind in {"machine.unreachable", "machine.reachable"}]
    assert changes == ["machine.unreachable", "machine.reachable"]


def test_machine_is_terminated_when_its_lease_ends(
    control: Control, fleet: Fleet, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = SMALL.model_copy(update={"lease": LEASE.model_copy(update={"max_cost": 0.4 / 3600 * 1.5})})
    key = rented(control, fleet, short)
    tend_until(fleet, key, READY)
    wall = time.time
    for days in (1, -1):  # a wrong wall clock has no effect
        monkeypatch.setattr(clock.time, "time", lambda days=days: wall() + days * 86400.0)
        machine = fleet.reconcile(key)
        assert machine is not None and machine.state == READY
    monkeypatch.setattr(clock.time, "time", wall)
    gone = tend_until(fleet, key, GONE)
    assert "cost" in gone.reason and not bill(cloud)["alive"]
    assert bill(cloud)["costs"][key] <= short.lease.max_cost * 1.5


def test_provider_terminates_machine_after_its_maximum_lifetime(
    control: Control, fleet: Fleet, cloud: FakeCloud
) -> None:
    lease = LEASE.model_copy(update={"max_lifetime": 1.2})
    key = rented(control, fleet, SMALL.model_copy(update={"lease": lease}))
    tend_until(fleet, key, READY)
    deadline = time.monotonic() + 60
    while bill(cloud)["alive"]:  # the control plane does nothing here
        assert time.monotonic() < deadline
        time.sleep(0.1)
    machine = cloud.find(key).machine
    assert machine is not None and (machine.status, machine.reason) == (MachineStatus.ENDED, "lifetime")


def test_home_with_old_database_terminates_unknown_machines(
    control: Control, fleet: Fleet, cloud: FakeCloud
) -> None:
    home = control.home
    first = rented(control, fleet)
    tend_until(fleet, first, READY)
    with closing(sqlite3.connect(home.database)) as source:
        source.execute("VACUUM INTO ?", (str(home.root / "yesterday.db"),))
    second = rented(control, fleet, number=2)
    tend_until(fleet, second, READY)
    control.store.close()
    for name in ("state.db-wal", "state.db-shm"):
        (home.root / name).unlink(missing_ok=True)
    shutil.copyfile(home.root / "yesterday.db", home.database)

    restored = drill_control(home.root)
    fleet = Fleet(home, restored.store)
    assert fleet.machine(second) is None
    assert terminate_unrecorded(fleet, grace=3600.0) == [] and second in bill(cloud)["alive"]  # it may be new
    assert terminate_unrecorded(fleet, grace=0.0) == [second]
    assert tend_until(fleet, second, GONE).reason == "it is not in this home's database"
    adopted = fleet.machine(first)
    assert adopted is not None and adopted.state == READY and bill(cloud)["alive"] == [first]
    restored.store.close()


def test_panic_terminates_all_machines_without_database(
    control: Control, fleet: Fleet, cloud: FakeCloud
) -> None:
    keys = [rented(control, fleet, number=number) for number in (1, 2)]
    for key in keys:
        tend_until(fleet, key, READY)
    other = "perilune-someoneelse-01x-1-0"
    cloud.create(other, MachineRequest("small", 60.0))
    control.store.close()
    control.home.database.write_bytes(b"not a database")
    lines: list[str] = []
    report = panic(Home.open(control.home.root), 30.0, lines.append)
    assert sorted(report.ended) == sorted(keys) and not report.left and not report.silent
    assert "cannot be read" in lines[0] and len(lines) == 3 and bill(cloud)["alive"] == [other]
    control.home.database.unlink()


def test_daily_cap_counts_promised_cost(control: Control, fleet: Fleet) -> None:
    lease = LEASE.model_copy(update={"max_lifetime": 3600.0 * 5})  # 1.0 by its cap on the cost
    rental = SMALL.model_copy(update={"lease": lease})
    key = rented(control, fleet, rental)
    with control.store.transaction() as session:
        assert not find_cap_problem(session, 2.0, rental, 0.4)
        assert "exceed the daily cap of 1.9: 1 is spent" in find_cap_problem(session, 1.9, rental, 0.4)
        row = session.get_one(Machine, key)
        row.state, row.cost = GONE.value, 0.0001
        assert not find_cap_problem(session, 1.01, rental, 0.4)


@pytest.mark.parametrize(
    ("age", "state", "gone_cost", "spent", "to_come_yet"),
    [  # hours at 0.4 an hour, with a lease of 5 hours and 1.0
        (0.5, READY, 0.0, 0.2, 0.8),
        (2.5, READY, 0.0, 1.0, 0.0),
        (10.0, MachineState.TERMINATING, 0.0, 4.0, 0.0),  # termination fails
        (30.0, MachineState.TERMINATING, 0.0, 9.6, 0.0),  # of its 30 hours, 24 are the last day's
        (30.0, GONE, 4.0, 1.6, 0.0),  # it ran for 10 hours, the last 4 of which count
        (30.0, GONE, 1.0, 0.0, 0.0),
    ],
)
def test_daily_cap_counts_actual_runtime_until_machine_is_gone(
    control: Control, fleet: Fleet, age: float, state: MachineState, gone_cost: float, spent: float,
    to_come_yet: float,
) -> None:  # fmt: skip
    lease = LEASE.model_copy(update={"max_lifetime": 3600.0 * 5})
    rental = SMALL.model_copy(update={"lease": lease})
    key = rented(control, fleet, rental)
    with control.store.transaction() as session:
        row, now = session.get_one(Machine, key), Instant.now()
        row.leased = Instant("an earlier boot", 0.0, now.wall - age * 3600.0)._asdict()
        row.ended = time.time() - (age - gone_cost / 0.4) * 3600.0 if state is GONE else None
        row.state, row.cost = state.value, gone_cost
        counted = cost_today([row])
        assert counted == pytest.approx(spent + to_come_yet, abs=0.01)
        assert remaining_cost(row) == pytest.approx(to_come_yet, abs=0.01) and remaining_cost(row) >= 0.0
        over = find_cap_problem(session, counted + 0.9, rental, 0.4)
        assert f"{counted:.4g} is spent" in over
        assert not find_cap_problem(session, counted + 1.1, rental, 0.4)


def test_cluster_id_is_stable(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "h")
    assert cluster_id(home) == cluster_id(Home.open(tmp_path / "h")) and len(cluster_id(home)) == 10


def spawn(home: Path, cloud: Path, kill_at: str = "") -> multiprocessing.Process:
    """Start a process that continues the lifecycle of one machine, and dies at the named point `kill_at`."""

    def live() -> None:
        os.environ[KILL_AT] = kill_at
        rent_from(home, cloud)
        life_of_a_machine(home)

    process = multiprocessing.get_context("fork").Process(target=live)
    process.start()
    return process


def test_kill_at_any_point_creates_one_machine_and_leaks_none(
    fleet: Fleet, cloud: FakeCloud, tmp_path: Path
) -> None:
    homes = {point: tmp_path / point for point in MACHINE_POINTS}
    for kill in (True, False):
        children = {point: spawn(home, cloud.folder, point if kill else "") for point, home in homes.items()}
        for child in children.values():
            child.join(60)
        expected = -signal.SIGKILL if kill else 0
        assert {point: child.exitcode for point, child in children.items()} == dict.fromkeys(homes, expected)
    known = bill(cloud)
    assert not known["alive"]
    for home in homes.values():
        tag = cluster_id(Home(home))
        assert sum(tag in key for key in known["costs"]) == 1
        control = drill_control(home)
        fleet = Fleet(control.home, control.store)
        assert fleet.machines() == [] and len(fleet.machines(include_gone=True)) == 1
        assert "machine.gone" in kinds(control)
        with control.store.snapshot() as session:
            assert {operation.status for operation in session.scalars(select(Operation))} == {"done"}
        control.store.close()


def test_reconcile_all_handles_every_machine(control: Control, fleet: Fleet) -> None:
    key = rented(control, fleet)
    end(control)
    deadline = time.monotonic() + 60
    while fleet.machines():
        assert time.monotonic() < deadline
        fleet.reconcile_all()
        time.sleep(0.02)
    machine = fleet.machine(key)
    assert machine is not None and machine.state == GONE
