"""The way to a machine by ssh, against a real sshd: what it refuses, quotes, and does not know."""

import contextlib
import io
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from sshd_cases import Line, Sshd, make_key, sshd

from perilune.execution.hosts import HostRefusedError, HostUnreachableError, local
from perilune.execution.hosts.ssh import SshHost, SshSettings

pytestmark = pytest.mark.xdist_group("sshd")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with sshd(tmp_path_factory.mktemp("ssh") / "sshd") as running:
        yield running


@pytest.fixture
def line(server: Sshd) -> Iterator[Line]:
    line = Line(server.port)
    yield line
    line.close()


@pytest.fixture
def host(server: Sshd, line: Line, tmp_path: Path) -> Iterator[SshHost]:
    host = SshHost(server.settings(line.port), tmp_path / "keys")
    yield host
    host.disconnect()


def test_arguments_arrive_as_they_were_given(host: SshHost) -> None:
    odd = ["a b", "", "$HOME", "`id`", "'", '"', "*", "x;y", "\\", "é\n-"]
    answer = host.run(["printf", "%s\\0", *odd])
    assert answer.exit_code == 0 and answer.output.decode().split("\0") == [*odd, ""]


def test_input_output_and_exit_code_pass_and_a_connection_is_shared(host: SshHost, line: Line) -> None:
    with tempfile.TemporaryFile() as sink:
        data = bytes(range(256)) * 4096
        assert host.run(["cat"], source=io.BytesIO(data), sink=sink).exit_code == 0
        sink.seek(0)
        assert sink.read() == data
    answer = host.run(["sh", "-c", "echo sorry >&2; exit 7"])
    assert (answer.exit_code, answer.errors) == (7, "sorry\n")
    assert host.run(["cat"]).output == b""  # nothing is read from this terminal
    assert len(line._open) == 2  # one connection, two ends


def test_another_host_key_is_a_hard_stop_and_an_unknown_one_too(
    server: Sshd, line: Line, tmp_path: Path
) -> None:
    settings = server.settings(line.port)
    other = settings.model_copy(update={"host_key": make_key(tmp_path / "other")})
    with pytest.raises(HostRefusedError, match="host key") as refused:
        SshHost(other, tmp_path).run(["touch", str(tmp_path / "ran")])
    assert "ssh-keygen -lf" in refused.value.remedy
    unknown = settings.model_copy(update={"host_key": None})
    with pytest.raises(HostRefusedError, match="host key"):
        SshHost(unknown, tmp_path).run(["touch", str(tmp_path / "ran")])
    assert not (tmp_path / "ran").exists()


def test_a_key_that_is_not_let_in_is_told(server: Sshd, tmp_path: Path) -> None:
    make_key(tmp_path / "stranger")
    settings = server.settings().model_copy(update={"identity": str(tmp_path / "stranger")})
    with pytest.raises(HostRefusedError, match="SSH authentication was refused"):
        SshHost(settings, tmp_path).run(["true"])


def test_a_cut_line_is_unknown_and_what_runs_there_goes_on(host: SshHost, line: Line, tmp_path: Path) -> None:
    host.run(["true"])
    threading.Timer(0.3, line.cut).start()
    with pytest.raises(HostUnreachableError):
        host.run(["sh", "-c", f"sleep 1; touch {tmp_path}/done"])
    with pytest.raises(HostUnreachableError):
        host.run(["true"])
    line.restore()
    assert host.run(["echo", "back"]).output == b"back\n"
    time.sleep(0.8)
    assert (tmp_path / "done").exists()


def test_no_answer_in_time_is_unknown(host: SshHost) -> None:
    with pytest.raises(HostUnreachableError, match="no answer"):
        host.run(["sleep", "20"], timeout=0.5)
    assert host.run(["echo", "on"]).output == b"on\n"


def test_output_without_end_is_unknown_and_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local, "MOST_OUTPUT", 1 << 20)
    monkeypatch.setattr(local, "CHECK_SECONDS", 0.05)
    began = time.monotonic()
    child = f"sleep 60 & echo $! > {tmp_path}/child; head -c 50m /dev/zero >&2; sleep 60"
    for command in (["cat", "/dev/zero"], ["sh", "-c", child]):
        with tempfile.TemporaryFile() as sink, pytest.raises(HostUnreachableError, match="too much output"):
            local.LocalHost().run(command, sink=sink, timeout=30.0)
    assert time.monotonic() - began < 20.0
    with contextlib.suppress(psutil.NoSuchProcess):  # a killed process is a zombie until init reaps it
        child_process = psutil.Process(int((tmp_path / "child").read_text()))
        while child_process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() - began < 20.0
            time.sleep(0.01)


def test_a_line_that_stalls_is_unknown_and_left_for_a_new_one(host: SshHost, line: Line) -> None:
    host.run(["true"])
    line.bend = lambda before, data: time.sleep(30)  # type: ignore[assignment, return-value]
    began = time.monotonic()
    with pytest.raises(HostUnreachableError, match="no answer"):
        host.run(["true"], timeout=1.0)
    assert time.monotonic() - began < 15
    line.bend = lambda before, data: data
    assert host.run(["echo", "on"]).output == b"on\n"


def test_the_users_own_configuration_holds(server: Sshd, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        f"Host box\n  HostName 127.0.0.1\n  Port {server.port}\n  IdentityFile {server.folder}/key\n"
        f"  UserKnownHostsFile {tmp_path}/known\n"
    )
    (tmp_path / "known").write_text(f"[127.0.0.1]:{server.port} {server.host_key}\n")
    host = SshHost(SshSettings(host="box", config=str(config)), tmp_path)
    assert host.run(["echo", "there"]).output == b"there\n"
    host.disconnect()
