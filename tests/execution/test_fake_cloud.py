"""The fake cloud: commands stream, terminated machines end, and records survive a killed server."""

import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.execution.hosts.protocol import Answer, Host, HostUnreachableError
from perilune.execution.processes import Presence
from perilune.execution.providers.fake.client import FakeCloud
from perilune.execution.providers.fake.process import start, stop
from perilune.execution.providers.fake.weather import Fault, Weather
from perilune.execution.providers.frames import Kind, encode_frame, read_frame
from perilune.execution.providers.protocol import (
    MachineKey,
    MachineRequest,
    MachineStatus,
    NoCapacityError,
    ProviderRefusedError,
    ProviderUnreachableError,
)

WANTED = MachineRequest("small", 600.0)


def key(number: int) -> str:
    return str(MachineKey("home", "01RUN", number))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cloud")
    server = start(folder, Weather(), capacity=3)
    yield folder
    cloud = FakeCloud(folder)
    for machine in cloud.list("perilune"):
        cloud.terminate(machine.key)
    stop(server)


@pytest.fixture
def cloud(folder: Path) -> Iterator[FakeCloud]:
    cloud = FakeCloud(folder)
    yield cloud
    for machine in cloud.list("perilune"):
        cloud.terminate(machine.key)


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def create_and_connect(cloud: FakeCloud, number: int) -> Host:
    """Create a machine and wait until it answers."""
    host = cloud.host(cloud.create(key(number), WANTED))

    def answers() -> bool:
        try:
            return host.run(["true"]).exit_code == 0
        except HostUnreachableError:
            return False

    until(answers)
    return host


def test_run_streams_data_and_returns_exit_codes(cloud: FakeCloud) -> None:
    host = create_and_connect(cloud, 1)
    sent = bytes(range(256)) * 4000
    assert host.run(["cat"], source=io.BytesIO(sent)).output == sent
    sink = io.BytesIO()
    answer = host.run(["sh", "-c", "head -c 3000000 /dev/zero; echo oops >&2; exit 3"], sink=sink)
    assert answer == Answer(3, b"", "oops\n") and len(sink.getvalue()) == 3_000_000
    assert host.run(["sh", "-c", "kill -9 $$"]).exit_code == 128 + 9
    assert host.run(["no-such-command"]).exit_code == 127
    assert host.run(["printf", "%s|", "a b", "$HOME", "*"]).output == b"a b|$HOME|*|"  # no shell expansion
    home = host.run(["pwd"]).output.decode().strip()
    assert home.endswith("/home") and host.run(["sh", "-c", "echo $HOME"]).output.decode().strip() == home
    began = time.monotonic()
    with pytest.raises(HostUnreachableError, match=r"no end within 0\.3 s"):
        host.run(["sleep", "600"], timeout=0.3)
    assert time.monotonic() - began < 120


def test_terminate_kills_every_process_of_the_machine(cloud: FakeCloud) -> None:
    host = create_and_connect(cloud, 2)
    stubborn = "trap '' TERM; (setsid sh -c 'trap \"\" TERM; echo $$; exec sleep 600 >&- 2>&-' &) ; sleep 0.2"
    pid = int(host.run(["sh", "-c", stubborn]).output)
    daemon = psutil.Process(pid)
    broken: list[bool] = []

    def wait() -> None:
        with pytest.raises(HostUnreachableError):
            host.run(["sleep", "600"])
        broken.append(True)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: len(psutil.Process(daemon.ppid()).children()) >= 2)
    cloud.terminate(key(2))
    waiting.join(60)
    until(lambda: not daemon.is_running())
    assert broken and cloud.find(key(2)).machine.status is MachineStatus.ENDED  # type: ignore[union-attr]
    assert not Path(host_home(cloud, key(2))).exists()  # the disk is wiped


def host_home(cloud: FakeCloud, name: str) -> Path:
    records = [json.loads(path.read_text()) for path in (cloud.folder / "machines").glob("*/record.json")]
    (machine,) = [record["id"] for record in records if record["key"] == name]
    return cloud.folder / "machines" / machine / "home"


def test_command_survives_dropped_connection(cloud: FakeCloud) -> None:
    host = create_and_connect(cloud, 3)
    done = host_home(cloud, key(3)) / "done"
    cut = threading.Timer(0.2, lambda: cloud.inject(key=key(3), fault=Fault.LINK_CUT, seconds=0.6))
    cut.start()
    with pytest.raises(HostUnreachableError):
        host.run(["sh", "-c", f"sleep 0.5; touch {done}"])
    with pytest.raises(HostUnreachableError, match="does not answer"):
        host.run(["true"])
    until(done.exists)
    assert cloud.find(key(3)).presence is Presence.PRESENT
    create_and_connect(cloud, 3)


def test_create_is_idempotent_per_key_and_reports_refusals(cloud: FakeCloud) -> None:
    first = cloud.create(key(4), WANTED)
    assert cloud.create(key(4), WANTED).id == first.id
    with pytest.raises(ProviderRefusedError, match="of kind small"):
        cloud.create(key(4), MachineRequest("large", 600.0))
    with pytest.raises(ProviderRefusedError, match="no kind 'huge'"):
        cloud.create(key(5), MachineRequest("huge", 600.0))
    with pytest.raises(NoCapacityError):
        for number in range(5, 9):
            cloud.create(key(number), WANTED)
    assert {offer.kind: offer.capacity for offer in cloud.offers()}["small"] == 0
    cloud.terminate(key(4))
    assert cloud.create(key(4), WANTED).status is MachineStatus.ENDED  # a key never gets a second machine
    assert cloud.find(key(99)).presence is Presence.ABSENT


def test_failed_call_gives_unknown_presence_or_an_error(cloud: FakeCloud, tmp_path: Path) -> None:
    cloud.inject(call="list", fault=Fault.LOST_ANSWER, times=1)
    assert cloud.find(key(1)).presence is Presence.UNKNOWN
    (tmp_path / "address.json").write_text((cloud.folder / "address.json").read_text())
    (tmp_path / "token").write_text("guessed")
    with pytest.raises(ProviderRefusedError, match="the token is missing or wrong"):
        FakeCloud(tmp_path).list("perilune")
    assert ((cloud.folder / "token").stat().st_mode & 0o777) == 0o600
    (tmp_path / "address.json").write_text('{"port": 1, "pid": 1}')
    with pytest.raises(ProviderUnreachableError):
        FakeCloud(tmp_path).create(key(1), WANTED)


def test_machines_and_records_survive_killed_server(tmp_path: Path) -> None:
    server = start(tmp_path, Weather())
    cloud = FakeCloud(tmp_path)
    host = create_and_connect(cloud, 1)
    host.run(["sh", "-c", "(sleep 0.5; touch done) > /dev/null 2>&1 &"])
    stop(server)
    assert cloud.find(key(1)).presence is Presence.UNKNOWN
    with pytest.raises(HostUnreachableError):
        host.run(["true"])
    until((host_home(cloud, key(1)) / "done").exists)
    server = start(tmp_path, Weather())
    machine = cloud.find(key(1)).machine
    assert machine is not None and machine.status is MachineStatus.RUNNING
    assert host.run(["ls"]).output == b"done\ntmp\n"
    cloud.terminate(key(1))
    stop(server)


@given(st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=300)), max_size=8), st.integers(0, 40))
def test_frames_round_trip_and_truncated_stream_ends(frames: list[tuple[Kind, bytes]], cut: int) -> None:
    wire = b"".join(encode_frame(kind, data) for kind, data in frames)
    stream = io.BytesIO(wire)
    assert [read_frame(stream) for _ in frames] == frames and read_frame(stream) is None
    torn = io.BytesIO(wire[: max(0, len(wire) - cut)])
    whole = list(iter(lambda: read_frame(torn), None))
    assert whole == frames[: len(whole)]


@given(
    st.text("0123456789ABCDEFGHJKMNPQRSTVWXYZ", min_size=1, max_size=26),
    st.integers(1, 10**6),
    st.integers(0, 64),
)
def test_machine_key_round_trips(run_id: str, epoch: int, rank: int) -> None:
    named = MachineKey("c0ffee", run_id, epoch, rank)
    assert MachineKey.parse(str(named)) == named
    assert MachineKey.parse(f"x{named}") is None
