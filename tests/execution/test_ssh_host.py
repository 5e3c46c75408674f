"""SshHost against a real sshd: quoting, refusals, timeouts and dropped connections."""

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

from perilune.execution.hosts import local
from perilune.execution.hosts.protocol import HostRefusedError, HostUnreachableError
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


def test_run_preserves_special_characters_in_arguments(host: SshHost) -> None:
    odd = ["a b", "", "$HOME", "`id`", "'", '"', "*", "x;y", "\\", "é\n-"]
    answer = host.run(["printf", "%s\\0", *odd])
    assert answer.exit_code == 0 and answer.output.decode().split("\0") == [*odd, ""]


def test_run_passes_input_output_exit_code_over_one_connection(host: SshHost, line: Line) -> None:
    with tempfile.TemporaryFile() as sink:
        data = bytes(range(256)) * 4096
        assert host.run(["cat"], source=io.BytesIO(data), sink=sink).exit_code == 0
        sink.seek(0)
        assert sink.read() == data
    answer = host.run(["sh", "-c", "echo sorry >&2; exit 7"])
    assert (answer.exit_code, answer.errors) == (7, "sorry\n")
    assert host.run(["cat"]).output == b""  # stdin is not the terminal
    assert len(line._open) == 2  # two ends of one connection


def test_run_refuses_changed_and_unknown_host_keys(server: Sshd, line: Line, tmp_path: Path) -> None:
    settings = server.settings(line.port)
    other = settings.model_copy(update={"host_key": make_key(tmp_path / "other")})
    with pytest.raises(HostRefusedError, match="host key") as refused:
        SshHost(other, tmp_path).run(["touch", str(tmp_path / "ran")])
    assert "ssh-keygen -lf" in refused.value.remedy
    unknown = settings.model_copy(update={"host_key": None})
    with pytest.raises(HostRefusedError, match="host key"):
        SshHost(unknown, tmp_path).run(["touch", str(tmp_path / "ran")])
    assert not (tmp_path / "ran").exists()


def test_folder_of_pinned_keys_may_have_any_name(server: Sshd, tmp_path: Path) -> None:
    for key in (server.settings().host_key, None):
        settings = server.settings().model_copy(update={"host_key": key})
        host = SshHost(settings, tmp_path / "my 100% keys", learn=key is None)
        assert host.run(["echo", "here"]).output == b"here\n"
        host.disconnect()


def test_connections_need_no_runtime_folder(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nothing"))  # as after `su`
    host = SshHost(server.settings(), tmp_path)
    assert host.run(["true"]).exit_code == 0
    host.disconnect()


def test_run_reports_refused_authentication(server: Sshd, tmp_path: Path) -> None:
    make_key(tmp_path / "stranger")
    settings = server.settings().model_copy(update={"identity": str(tmp_path / "stranger")})
    with pytest.raises(HostRefusedError, match="SSH authentication was refused"):
        SshHost(settings, tmp_path).run(["true"])


def test_dropped_connection_is_unreachable_and_remote_command_continues(
    host: SshHost, line: Line, tmp_path: Path
) -> None:
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


def test_command_timeout_is_unreachable(host: SshHost) -> None:
    with pytest.raises(HostUnreachableError, match="no answer"):
        host.run(["sleep", "20"], timeout=0.5)
    assert host.run(["echo", "on"]).output == b"on\n"


def test_endless_output_is_unreachable_and_command_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local, "MAX_OUTPUT_BYTES", 1 << 20)
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


def test_stalled_connection_is_unreachable_and_replaced(host: SshHost, line: Line) -> None:
    host.run(["true"])
    line.bend = lambda before, data: time.sleep(30)  # type: ignore[assignment, return-value]
    began = time.monotonic()
    with pytest.raises(HostUnreachableError, match="no answer"):
        host.run(["true"], timeout=1.0)
    assert time.monotonic() - began < 15
    line.bend = lambda before, data: data
    assert host.run(["echo", "on"]).output == b"on\n"


def test_host_uses_ssh_config_of_the_user(server: Sshd, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        f"Host box\n  HostName 127.0.0.1\n  Port {server.port}\n  IdentityFile {server.folder}/key\n"
        f"  UserKnownHostsFile {tmp_path}/known\n"
    )
    (tmp_path / "known").write_text(f"[127.0.0.1]:{server.port} {server.host_key}\n")
    host = SshHost(SshSettings(host="box", config=str(config)), tmp_path)
    assert host.run(["echo", "there"]).output == b"there\n"
    host.disconnect()
