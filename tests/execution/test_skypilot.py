"""SkyPilot clusters as rented machines, with failing, stale and preempting clouds."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sky_cases import FakeSky, stale

from perilune.errors import RequestError
from perilune.execution.hosts.ssh import SshHost
from perilune.execution.processes import Presence
from perilune.execution.providers.protocol import (
    MachineKey,
    MachineRequest,
    MachineStatus,
    NoCapacityError,
    Offer,
    ProviderRefusedError,
    ProviderUnreachableError,
    RentedMachine,
)
from perilune.execution.providers.skypilot import client, connection
from perilune.execution.providers.skypilot.client import SkyPilot
from perilune.execution.providers.skypilot.connection import find_interpreter

WANTED = MachineRequest("spot", 3700.0)
TAG = "perilune-home"


def key(number: int, rank: int = 0) -> str:
    return str(MachineKey("home", "01RUN", number, rank))


@pytest.fixture
def sky(tmp_path: Path) -> FakeSky:
    return FakeSky(tmp_path / "sky")


@pytest.fixture
def cloud(sky: FakeSky, tmp_path: Path) -> Iterator[SkyPilot]:
    with sky.provider(tmp_path / "keys") as cloud:
        yield cloud


def create_running(cloud: SkyPilot, number: int = 1, **request: Any) -> RentedMachine:
    made = cloud.create(key(number), MachineRequest("spot", 3700.0, **request))
    assert made.status is MachineStatus.RUNNING
    return made


def only_machine(cloud: SkyPilot, status: MachineStatus) -> RentedMachine:
    (machine,) = cloud.list(TAG)
    assert machine.status is status, machine
    return machine


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_machine_lifecycle_from_offer_to_termination(cloud: SkyPilot, sky: FakeSky, tmp_path: Path) -> None:
    assert cloud.offers()[:2] == [Offer("spot", 0.4, None, True), Offer("plain", 1.2, None, False)]
    assert cloud.find(key(1)).presence is Presence.ABSENT and not cloud.list(TAG)
    machine = create_running(cloud)
    assert (machine.key, machine.id, machine.kind, machine.price) == (key(1), key(1), "spot", 0.4)
    assert machine.address == "10.0.0.1" and machine.billed_seconds < 60
    assert sky.tasks() == [{
        "name": "spot",
        "num_nodes": 1,
        "resources": {
            "infra": "aws", "accelerators": "A100:1", "use_spot": True, "max_hourly_cost": 0.4,
            "autostop": {"idle_minutes": 61, "down": True, "wait_for": "none"},
        },
    }]  # fmt: skip
    assert cloud.create(key(1), WANTED).id == machine.id and sky.made() == [key(1)]
    with sky.provider(tmp_path / "keys") as stranger:  # a client without memory
        assert [row.kind for row in stranger.list(TAG)] == ["spot"] and not stranger.list("perilune-other")
        assert stranger.create(key(1), WANTED).status is MachineStatus.RUNNING
        stranger.terminate(key(1))
    until(lambda: not sky.alive())
    assert sky.made() == [key(1)]
    assert only_machine(cloud, MachineStatus.ENDED).reason == "preempted"  # as far as this client knows
    cloud.terminate(key(1))  # no error without a cluster
    cloud.terminate(key(1))


def test_pending_launch_is_listed_unique_and_cancellable(
    cloud: SkyPilot, sky: FakeSky, monkeypatch: pytest.MonkeyPatch
) -> None:
    sky.weather(launch_seconds=1.0)
    monkeypatch.setattr(client, "CREATE_TIMEOUT_S", 0.0)
    assert cloud.create(key(1), WANTED).status is MachineStatus.PENDING
    with sky.state() as known:  # not started yet: still in SkyPilot's queue
        known["clusters"].clear()
    assert cloud.create(key(1), WANTED).status is MachineStatus.PENDING
    assert only_machine(cloud, MachineStatus.PENDING).key == key(1) and len(sky.tasks()) == 1
    cloud.terminate(key(1))
    assert not cloud.list(TAG)
    time.sleep(1.0)
    assert not cloud.list(TAG) and not sky.made()  # the launch is cancelled and does not happen later


@pytest.mark.parametrize("when", ["after", "death"])
def test_launch_with_lost_answer_creates_one_machine(cloud: SkyPilot, sky: FakeSky, when: str) -> None:
    sky.weather(**{f"{when}_launch": 1})
    with pytest.raises(ProviderUnreachableError):
        cloud.create(key(1), WANTED)
    assert cloud.create(key(1), WANTED).status is MachineStatus.RUNNING and sky.made() == [key(1)]


def test_create_distinguishes_no_capacity_refused_and_unreachable(
    cloud: SkyPilot, sky: FakeSky, monkeypatch: pytest.MonkeyPatch
) -> None:
    sky.weather(launch=["capacity", "capacity", "refused"])
    for _ in range(2):
        with pytest.raises(NoCapacityError, match=r"ResourcesUnavailableError: no A100 anywhere$"):
            cloud.create(key(1), WANTED)
    with pytest.raises(ProviderRefusedError, match="sky check"):
        cloud.create(key(1), WANTED)
    with pytest.raises(
        ProviderRefusedError, match="sky check"
    ):  # a repeated launch cannot succeed, so none is sent
        cloud.create(key(1), WANTED)
    assert len(sky.tasks()) == 3 and not cloud.list(TAG)
    sky.weather(launch=["capacity"], launch_seconds=0.3)
    monkeypatch.setattr(client, "CREATE_TIMEOUT_S", 0.0)
    assert cloud.create(key(5), WANTED).status is MachineStatus.PENDING
    until(lambda: not cloud.list(TAG))
    with pytest.raises(NoCapacityError):  # the unreported failure is raised before another launch
        cloud.create(key(5), WANTED)
    assert len(sky.tasks()) == 4 and cloud.create(key(5), WANTED).status is MachineStatus.PENDING
    monkeypatch.undo()
    cloud.terminate(key(5))
    sky.weather(launch=["infeasible", "broken"], launch_seconds=0.0)
    with pytest.raises(ProviderRefusedError, match="no cloud has it"):
        cloud.create(key(2), WANTED)
    with pytest.raises(ProviderUnreachableError, match="setup failed"):  # its remains may cost money
        cloud.create(key(3), WANTED)
    assert only_machine(cloud, MachineStatus.PENDING).key == key(3)
    with pytest.raises(ProviderRefusedError, match="acelerators"):
        cloud.create(key(4), MachineRequest("wrong", 60.0))
    with pytest.raises(ProviderRefusedError, match="no kind 'huge'"):
        cloud.create(key(4), MachineRequest("huge", 60.0))


def test_failed_call_gives_unknown_presence_or_unreachable_error(cloud: SkyPilot, sky: FakeSky) -> None:
    create_running(cloud)
    for call in ("status", "api_status"):
        sky.weather(**{f"before_{call}": 1})
        with pytest.raises(ProviderUnreachableError, match="Could not connect"):
            cloud.list(TAG)
    sky.weather(before_status=1)
    assert cloud.find(key(1)).presence is Presence.UNKNOWN
    sky.weather(before_status=1)
    with pytest.raises(ProviderUnreachableError):
        cloud.create(key(2), WANTED)
    sky.weather(death_status=1)
    with pytest.raises(ProviderUnreachableError, match="no answer"):
        cloud.list(TAG)
    only_machine(cloud, MachineStatus.RUNNING)  # a new bridge process answers


def test_stale_record_during_cloud_outage_is_marked_unseen(cloud: SkyPilot, sky: FakeSky) -> None:
    create_running(cloud)
    sky.weather(cloudy=True)
    sky.change(key(1), updated=stale(), alive=False)
    assert only_machine(cloud, MachineStatus.RUNNING).unseen == "SkyPilot cannot ask its cloud"
    assert cloud.find(key(1)).presence is Presence.UNKNOWN
    sky.weather(cloudy=False)
    assert only_machine(cloud, MachineStatus.ENDED).reason == "preempted"


@pytest.mark.parametrize(
    ("befalls", "status", "reason"),
    [
        ({"status": "AUTOSTOPPING"}, MachineStatus.ENDING, "lifetime"),
        ({"status": "STOPPED"}, MachineStatus.ENDING, "preempted"),
        ({"status": "STOPPED", "spot": False}, MachineStatus.ENDING, "host failure"),
        ({"status": "INIT", "why": "Cluster is abnormal: ray is unhealthy"}, MachineStatus.RUNNING, ""),
        ({"status": "INIT", "why": "one or more nodes terminated"}, MachineStatus.ENDING, "preempted"),
        ({"status": "INIT", "ever_up": False}, MachineStatus.PENDING, ""),
        ({"status": "PENDING"}, MachineStatus.PENDING, ""),
    ],
)  # fmt: skip
def test_cluster_status_maps_to_machine_status(
    cloud: SkyPilot, sky: FakeSky, befalls: dict[str, Any], status: MachineStatus, reason: str
) -> None:
    create_running(cloud)
    sky.change(key(1), **befalls)
    assert only_machine(cloud, status).reason == reason
    if befalls["status"] == "STOPPED":  # its disk costs money, and nothing starts it again
        until(lambda: [machine.status for machine in cloud.list(TAG)] in ([], [MachineStatus.ENDED]))
        assert not sky.alive()


@pytest.mark.parametrize(
    ("befalls", "reason"),
    [({}, "preempted"), ({"spot": False}, "host failure"), ({"minutes": 1}, "lifetime")],
)
def test_vanished_machine_reports_reason_to_the_client_that_saw_it_alive(
    cloud: SkyPilot, sky: FakeSky, tmp_path: Path, befalls: dict[str, Any], reason: str
) -> None:
    create_running(cloud)
    sky.change(key(1), **befalls)
    assert only_machine(cloud, MachineStatus.RUNNING)
    sky.change(key(1), alive=False)
    for _ in range(2):
        assert only_machine(cloud, MachineStatus.ENDED).reason == reason
    with sky.provider(tmp_path / "keys") as stranger:
        assert not stranger.list(TAG)
    create_running(cloud, 2)
    cloud.terminate(key(2))
    until(lambda: not sky.alive())
    assert cloud.find(key(2)).presence is Presence.ABSENT  # an expected end


def test_failed_termination_raises_and_is_retried(cloud: SkyPilot, sky: FakeSky) -> None:
    create_running(cloud)
    sky.weather(down=["stuck", "stuck"], down_seconds=0.2)
    cloud.terminate(key(1))
    cloud.terminate(key(1))  # a termination is in progress
    until(lambda: requests(sky, "sky.down") == ["FAILED"])
    with pytest.raises(ProviderUnreachableError, match="the cloud said 500"):
        cloud.terminate(key(1))
    until(lambda: requests(sky, "sky.down") == ["FAILED", "FAILED"])
    assert sky.alive() == [key(1)] and only_machine(cloud, MachineStatus.RUNNING)
    with pytest.raises(ProviderUnreachableError, match="the cloud said 500"):
        cloud.terminate(key(1))
    until(lambda: not cloud.list(TAG))
    assert not sky.alive()


def requests(sky: FakeSky, name: str) -> list[str]:
    with sky.state() as known:
        due = [row for row in known["requests"] if row["name"] == name and time.time() >= row["due"]]
    if any(row["status"] == "RUNNING" for row in due):
        sky.look()
    return [row["status"] for row in due]


def test_machines_of_an_attempt_form_one_cluster(cloud: SkyPilot, sky: FakeSky, tmp_path: Path) -> None:
    wanted = MachineRequest("plain", 600.0, 3)
    head = cloud.create(key(1, 2), wanted)  # any rank may come first
    assert head.key == key(1, 2) and sky.tasks()[0]["num_nodes"] == 3
    for rank in (0, 1):
        assert cloud.create(key(1, rank), wanted).key == key(1, rank)
    machines = cloud.list(TAG)
    assert [machine.key for machine in machines] == [key(1), key(1, 1), key(1, 2)] and sky.made() == [key(1)]
    assert [machine.address for machine in machines] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert {(machine.id, machine.kind, machine.price) for machine in machines} == {(key(1), "plain", 1.2)}
    hosts = [cloud.host(machine) for machine in machines]
    assert [host.name for host in hosts] == [f"ssh:{key(1)}{end}" for end in ("", "-worker1", "-worker2")]
    config = str(sky.home / ".sky/generated/ssh" / key(1))
    assert all(isinstance(host, SshHost) and host.settings.config == config for host in hosts)
    cloud.terminate(key(1, 1))
    assert not cloud.list(TAG) and not sky.alive()


def test_list_caches_status_between_polls_and_expires_it(sky: FakeSky, tmp_path: Path) -> None:
    with sky.provider(tmp_path, look_seconds=0.5, visibility_seconds=2) as cloud:
        assert not cloud.list(TAG)
        create_running(cloud)
        assert only_machine(cloud, MachineStatus.RUNNING)  # own changes are visible at once
        sky.change(key(1), alive=False)
        assert only_machine(cloud, MachineStatus.RUNNING)  # the cached status
        time.sleep(0.6)
        assert only_machine(cloud, MachineStatus.RUNNING)  # while a refresh is in progress
        until(lambda: cloud.list(TAG)[0].status is MachineStatus.ENDED)
        sky.weather(before_status=10**6)
        assert only_machine(cloud, MachineStatus.ENDED)
        time.sleep(1.1)
        with pytest.raises(ProviderUnreachableError):  # the cached status has expired
            cloud.list(TAG)
        sky.weather(before_status=0)
        create_running(cloud, 2)
        cloud.terminate(key(2))
        assert [machine.key for machine in cloud.list(TAG)] == [key(1)]


def test_settings_refuse_invalid_values(sky: FakeSky, tmp_path: Path) -> None:
    for changes, message in (
        (
            {"kinds": {"a": {"resources": {"autostop": 10}}}},
            "'autostop' cannot be set here: the lease sets it",
        ),
        ({"kinds": {"A_100": {"resources": {}}}}, "should match pattern"),
        ({"kinds": {}}, "at least 1 item"),
        ({"look_seconds": 30}, "visibility_seconds must be at least three times look_seconds"),
    ):
        with pytest.raises(ValueError, match=message):
            sky.provider(tmp_path, **changes)


def test_interpreter_is_found_from_the_sky_script_or_named_in_errors(
    sky: FakeSky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(RequestError, match="SkyPilot is not installed") as refused:
        sky.provider(tmp_path, python=None).list(TAG)
    assert "pipx install 'skypilot[aws]'" in str(refused.value)
    script = tmp_path / "bin" / "sky"
    script.parent.mkdir()
    for head in (
        f"#!{sky.python}3.11 -I\n",
        f"#!/bin/sh\n'''exec' '{sky.python}3.11' \"$0\" \"$@\"\n' '''\n",
    ):
        script.write_text(head)
        script.chmod(0o755)
        assert find_interpreter(None) == f"{sky.python}3.11"
    monkeypatch.undo()
    with pytest.raises(RequestError, match=r"has no SkyPilot \((ImportError|ModuleNotFoundError)"):
        sky.provider(tmp_path, python="/usr/bin/python3").list(TAG)
    with pytest.raises(RequestError, match="cannot be started"):
        sky.provider(tmp_path, python=str(tmp_path / "none")).list(TAG)


def test_bridge_without_answer_times_out(
    sky: FakeSky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CALL_SECONDS", 0.3)
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\necho trouble >&2\nexec sleep 600\n")
    mute.chmod(0o755)
    with pytest.raises(ProviderUnreachableError, match=r"no answer \(trouble\)"):
        sky.provider(tmp_path, python=str(mute)).list(TAG)
