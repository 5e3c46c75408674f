"""Runs on machines rented through a fake SkyPilot; each machine is a real sshd."""

import getpass
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from cloud_cases import end, hurry, rented, tend_until
from drill_cases import (
    PATIENCE,
    Command,
    attempts,
    begin,
    drill_plan,
    only_run,
    wait_for_progress,
    wait_for_second_checkpoint,
)
from hosts_cases import interpreter
from sky_cases import LEASE, SPOT, FakeSky, stale
from sshd_cases import Sshd, make_key, sshd

from perilune.bundle.verify import verify
from perilune.control.machines import sweep
from perilune.control.machines.lifecycle import Fleet
from perilune.control.machines.panic import panic
from perilune.control.queries.lookup import events_after
from perilune.control.record.transitions import MachineState
from perilune.control.runs.experiments import Control, StagePlan, advance
from perilune.control.runs.planner import Retry
from perilune.control.runs.progress import StageEvent, StageFinished
from perilune.control.runs.requests import cancel_run
from perilune.control.runs.templates import RentedTarget, Template
from perilune.execution.limits import AttemptLimits
from perilune.execution.placements.remote import Site
from perilune.execution.providers.protocol import MachineRequest
from perilune.execution.providers.skypilot import client

pytestmark = pytest.mark.xdist_group("sshd")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    with sshd(tmp_path / "sshd") as running:
        yield running


@pytest.fixture
def sky(tmp_path: Path, server: Sshd) -> FakeSky:
    way = {
        "HostName": "127.0.0.1", "Port": server.port, "User": getpass.getuser(),
        "IdentityFile": server.folder / "key", "IdentitiesOnly": "yes",
    }  # fmt: skip
    return FakeSky(tmp_path / "sky", "".join(f"  {name} {value}\n" for name, value in way.items()))


@pytest.fixture
def fleet(control: Control, sky: FakeSky, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    hurry(monkeypatch, look_seconds=0.1)
    sky.rent_to(control.home.root)
    fleet = control.reconciler.rentals.fleet
    yield fleet
    fleet.providers.get("sky").__exit__()  # type: ignore[attr-defined]


@pytest.fixture
def template(tmp_path: Path) -> Template:
    python, workspace = interpreter(tmp_path / "python"), tmp_path / "box"
    site = Site(python=str(python), installed=True, workspace=str(workspace))
    target = RentedTarget(name="rented", provider="sky", kind="spot", lease=LEASE, site=site)
    limits = AttemptLimits(on_box_stop_after=60.0)
    return Template(placement=target, retry=Retry(base=0.01), limits=limits, bring="all")


def go(control: Control, template: Template, plan: StagePlan) -> Iterator[StageEvent]:
    return advance(control, begin(control, [plan]), [plan], template=template, poll=0.05)


def until(control: Control, happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        control.reconciler.reconcile_all(act=False)
        time.sleep(0.05)


def test_run_resumes_on_next_cluster_after_losing_the_first(
    control: Control, fleet: Fleet, sky: FakeSky, template: Template, server: Sshd
) -> None:
    sky.weather(launch=["capacity"], after_launch=1, down=["stuck"])
    events = go(control, template, drill_plan(steps=4, fail_at=2, how="hang", fresh_only=True))
    wait_for_progress(events)
    run = only_run(control)
    first, second = fleet.machine_key(run.id, 1), fleet.machine_key(run.id, 2)
    assert sky.made() == [first]  # despite a launch without capacity and a lost response
    (known,) = (control.home.root / "ssh").glob("*.known_hosts")
    assert server.host_key in known.read_text()  # learned at the first connection and pinned

    wait_for_second_checkpoint(control)
    sky.weather(before_status=2)
    until(control, lambda: any(event.kind == "machine.reachable" for event in events_after(control)))
    until(control, lambda: attempts(control)[0].state == "running")
    sky.change(first, alive=False)
    last = list(events)[-1]
    assert isinstance(last, StageFinished) and last.summary["began_at"] == 2
    assert [attempt.state for attempt in attempts(control)] == ["preempted", "succeeded"]
    assert verify(control.directory(only_run(control)), run.bundle_digest) == []  # collected
    assert sky.made() == [first, second]
    until(control, lambda: not fleet.machines())  # also the machine whose termination failed at first
    assert not sky.alive() and all(attempt.cleanup == "done" for attempt in attempts(control))
    assert [task["resources"]["autostop"]["down"] for task in sky.tasks()] == [True] * len(sky.tasks())


def test_changed_host_key_makes_attempt_unreachable_and_panic_ends_machine(
    control: Control, fleet: Fleet, sky: FakeSky, template: Template, server: Sshd
) -> None:
    events = go(control, template, drill_plan(steps=4, fail_at=2, how="hang", fresh_only=True))
    wait_for_progress(events)
    run = only_run(control)
    make_key(server.folder / "host_key")
    server.stop()
    server.start()
    until(control, lambda: attempts(control)[0].reachability == "unreachable")
    cancel_run(control, run.id, force=True)
    report = panic(control.home, 20.0)
    assert report.ended and not report.left and not report.silent and not sky.alive()
    until(control, lambda: not fleet.machines())


def test_stale_cluster_status_ends_no_machine(control: Control, fleet: Fleet, sky: FakeSky) -> None:
    key = rented(control, fleet, SPOT)
    tend_until(fleet, key, MachineState.READY)
    sky.weather(cloudy=True)
    sky.change(key, alive=False, updated=stale())
    for _ in range(5):
        machine = fleet.reconcile(key)
        assert machine is not None and machine.state == MachineState.READY and not machine.missing_since
        time.sleep(0.15)
    sky.weather(cloudy=False)
    assert tend_until(fleet, key, MachineState.GONE).reason == "preempted"


def test_unneeded_launch_is_cancelled_and_unknown_cluster_is_terminated(
    control: Control, fleet: Fleet, sky: FakeSky, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CREATE_TIMEOUT_S", 0.0)
    sky.weather(launch_seconds=0.5)
    key = rented(control, fleet, SPOT)
    fleet.reconcile(key)
    end(control)
    tend_until(fleet, key, MachineState.GONE)
    time.sleep(0.5)
    assert not sky.alive() and not sky.made()  # the cancelled launch had no later effect

    sky.weather(launch_seconds=0.0)
    forgotten = fleet.machine_key("01FORGOTTEN", 3)
    provider = fleet.providers.get("sky")
    provider.create(forgotten, MachineRequest("plain", 600.0, 2))
    assert sky.alive() == [forgotten]
    assert sorted(sweep.terminate_unrecorded(fleet, grace=0.0)) == [
        forgotten,
        fleet.machine_key("01FORGOTTEN", 3, 1),
    ]
    gone = tend_until(fleet, forgotten, MachineState.GONE)
    assert (gone.kind, gone.price, gone.reason) == ("plain", 1.2, "it is not in this home's database")
    assert not sky.alive()


def test_offers_lists_machines_and_locates_configuration_errors(
    perilune: Command, control: Control, sky: FakeSky
) -> None:
    code, out, _ = perilune("machines", "offers")
    assert code == 0 and "no machines are offered" in out
    sky.rent_to(control.home.root)
    code, out, err = perilune("machines", "offers")
    assert code == 2 and "sky:spot  0.4 per hour  preemptible\n" in out
    path = control.home.root / "providers.yaml"
    lines = path.read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines) if "acelerators" in text]  # of its section
    assert f"{path}:{line}: InvalidSkyPilotConfigError" in err
    code, out, _ = perilune("machines", "offers", "--json")
    assert {offer["kind"] for offer in json.loads(out)["offers"]} == {"spot", "plain", "wrong"}

    templates = control.home.root / "templates"
    templates.mkdir()
    for kind, problem in (("spot", ""), ("wrong", "acelerators"), ("huge", "no kind 'huge'")):
        target = {"name": "rented", "provider": "sky", "kind": kind, "lease": LEASE.model_dump()}
        (templates / "cloud.yaml").write_text(yaml.safe_dump({"placement": target}))
        code, _, err = perilune("templates", "validate", "cloud")
        assert (code, problem in err) == (2 if problem else 0, True), err

    path.write_text(path.read_text().replace("use_spot", "autostop"))
    code, _, err = perilune("machines", "offers")
    assert code == 2 and "'autostop' cannot be set here: the lease sets it" in err and f"{path}:" in err
