"""Helpers for tests with the fake cloud: homes that rent from it, and attempts that need a machine."""

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from drill_cases import begin, drill_control, drill_plan, wait_for
from hosts_cases import interpreter
from sqlalchemy import select

from perilune.control.machines import lifecycle as machines
from perilune.control.machines import listings, panic
from perilune.control.machines import planner as machine_planner
from perilune.control.machines.leases import Lease, Rental
from perilune.control.machines.lifecycle import Fleet
from perilune.control.record.faults import kill_point
from perilune.control.record.store import Attempt, Machine, Run, move_attempt
from perilune.control.record.transitions import AttemptState, Cleanup, MachineState, RunState
from perilune.control.runs.experiments import Control
from perilune.control.runs.planner import Retry
from perilune.control.runs.templates import RentedTarget, Template
from perilune.execution.limits import AttemptLimits
from perilune.execution.placements.remote import Site
from perilune.execution.providers.fake.client import FakeCloud

LEASE = Lease(max_lifetime=600.0, idle=300.0, max_cost=1.0, ready_within=300.0)
SMALL = Rental(provider="fake", kind="small", lease=LEASE)


def hurry(patch: pytest.MonkeyPatch, look_seconds: float = 0.0) -> None:
    """Shorten the intervals between observations and repeated calls in this process."""
    patch.setattr(machine_planner, "CONFIRM_INTERVAL_S", 0.05)
    patch.setattr(machine_planner, "CREATE_INTERVAL_S", 0.2)
    patch.setattr(listings, "LISTING_TTL_S", look_seconds)
    patch.setattr(machines, "TERMINATE_INTERVAL_S", 0.05)
    patch.setattr(panic, "LOOK_INTERVAL_S", 0.1)


def rent_from(
    home: Path,
    cloud: Path,
    *,
    daily_cap: float = 100.0,
    visibility: float = 0.0,
    names: tuple[str, ...] = ("fake",),
) -> None:
    """Write a providers.yaml with which the home at `home` rents from the fake cloud at `cloud`."""
    provider = {"type": "fake", "folder": str(cloud), "visibility_seconds": visibility}
    home.mkdir(parents=True, exist_ok=True)
    document = {"daily_cap": daily_cap, "providers": {name: dict(provider) for name in names}}
    (home / "providers.yaml").write_text(yaml.safe_dump(document))


def an_attempt(control: Control, number: int = 1, run_id: str = "01RUN") -> Attempt:
    """Add a run and its current attempt, which has no machine yet."""
    with control.store.transaction() as session:
        run = session.get(Run, run_id)
        if run is not None:
            run.current_epoch = number
    if run is None:
        experiment = begin(control, [drill_plan()])
        with control.store.transaction() as session:
            session.add(
                Run(
                    id=run_id, submit_key=run_id, experiment_id=experiment, stage="drill", task="drill",
                    bundle_digest="d", current_epoch=number, state=RunState.ACTIVE.value, created=time.time(),
                )
            )  # fmt: skip
    with control.store.transaction() as session:
        attempt = Attempt(
            run_id=run_id, number=number, placement="fake", launcher="process", created=time.time()
        )
        session.add(attempt)
        return attempt


def rented_template(folder: Path, grace: float | None = None) -> Template:
    """A template for small machines that use this Python, installed at `folder`."""
    site = Site(python=str(interpreter(folder, grace=grace)), installed=True)
    target = RentedTarget(name="rented", provider="fake", kind="small", lease=LEASE, site=site)
    limits = AttemptLimits(on_box_stop_after=60.0)
    return Template(placement=target, retry=Retry(base=0.01), limits=limits, bring="all")


def rented(
    control: Control, fleet: Fleet, rental: Rental = SMALL, number: int = 1, run_id: str = "01RUN"
) -> str:
    """Request a machine for a new attempt; return its key."""
    attempt = an_attempt(control, number, run_id)
    with control.store.transaction() as session:
        return fleet.rent(session, attempt, rental, price=0.4)[0].key


def end(control: Control, *, collected: bool = True, number: int = 1) -> None:
    """End the attempt as cancelled."""
    with control.store.transaction() as session:
        row = session.get_one(Attempt, ("01RUN", number))
        row.cleanup = (Cleanup.DONE if collected else Cleanup.PENDING).value
        move_attempt(session, row, AttemptState.CANCELLED)


def tend_until(fleet: Fleet, key: str, state: MachineState, seconds: float = 60.0) -> Machine:
    """Reconcile a machine until it is in this state."""
    deadline = time.monotonic() + seconds
    while (machine := fleet.reconcile(key)) is None or machine.state != state:
        assert time.monotonic() < deadline, f"{machine and (machine.state, machine.reason)} is not {state}"
        time.sleep(0.02)
    return machine


def bill(cloud: FakeCloud) -> dict[str, Any]:
    """The cloud's own account: costs by key, and keys of live machines."""
    return dict(cloud.call("GET", "/bill"))


def all_gone(control: Control, cloud: FakeCloud) -> None:
    """Reconcile until no machine is left and the cleanup of all attempts is done."""

    def gone() -> bool:
        control.reconciler.reconcile_all(act=False)
        return not control.reconciler.rentals.fleet.machines()

    wait_for(gone, "the end of all machines")
    assert not bill(cloud)["alive"]
    with control.store.snapshot() as session:
        assert set(session.scalars(select(Attempt.cleanup))) == {"done"}


def life_of_a_machine(home: Path) -> None:
    """Rent, use and release a machine; continues where an earlier process stopped."""
    control = drill_control(home)
    fleet = Fleet(control.home, control.store)
    key = fleet.machine_key("01RUN", 1)
    if fleet.machine(key) is None:
        with control.store.snapshot() as session:
            attempt = session.get(Attempt, ("01RUN", 1))
        attempt = attempt or an_attempt(control)
        with control.store.transaction() as session:
            fleet.rent(session, attempt, SMALL, 0.4)
        kill_point("rent.committed")
    while fleet.reconcile(key).state == MachineState.REQUESTED:
        time.sleep(0.02)
    with control.store.snapshot() as session:
        ended = session.get_one(Attempt, ("01RUN", 1)).ended
    if ended is None:
        end(control, collected=False)
    fleet.reconcile(key)
    with control.store.transaction() as session:
        session.get_one(Attempt, ("01RUN", 1)).cleanup = Cleanup.DONE.value
    tend_until(fleet, key, MachineState.GONE)
