"""The `docker` launcher with real containers. Docker runs the placement conformance tests, Podman the
hardest container test. A wrapper program makes Docker fail.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from container_cases import SOURCE, Program, docker, podman
from drill_cases import INSTALLED, drill_bundle, wait_for
from placement_conformance import (
    PlacementConformance,
    assigned,
    ended,
    home_has,
    look,
    stage,
    until,
    working,
)
from sshd_cases import Sshd, sshd

from perilune.errors import WorkFailedError
from perilune.execution.hosts.local import LocalHost
from perilune.execution.hosts.ssh import SshHost
from perilune.execution.launchers.docker import read_container
from perilune.execution.limits import AttemptLimits
from perilune.execution.placements.protocol import Assignment, Placement
from perilune.execution.placements.remote import RemotePlacement, Site
from perilune.execution.processes import Presence

pytestmark = pytest.mark.xdist_group("sshd")
CANARY = "canary-in-a-container"


@pytest.fixture(scope="module", params=["docker", "podman"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    folder = tmp_path_factory.mktemp("containers") / request.param
    with {"docker": docker, "podman": podman}[request.param](folder) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with sshd(tmp_path_factory.mktemp("ssh") / "sshd") as running:
        yield running


only_docker = pytest.mark.parametrize("program", ["docker"], indirect=True)


def docker_placement(program: Program, tmp_path: Path, **settings: Any) -> RemotePlacement:
    environment = {"PYTHONPATH": f"{INSTALLED}{os.pathsep}{SOURCE}", "OMP_NUM_THREADS": "1"}
    site = Site(installed=True, workspace=str(tmp_path / "workspace"), environment=environment)
    return RemotePlacement(LocalHost(), site, AttemptLimits(), program.container(tmp_path, **settings))


def container_ids(program: Program) -> list[str]:
    return program("ps", "--all", "--quiet", "--no-trunc").split()


@only_docker
class TestDockerOverSsh(PlacementConformance):
    @pytest.fixture
    def placement(self, program: Program, server: Sshd, tmp_path: Path) -> Iterator[Placement]:
        host = SshHost(server.settings(), tmp_path / "keys")
        here = docker_placement(program, tmp_path)
        site = here.site.model_copy(update={"workspace": str(tmp_path / "a workspace")})
        yield RemotePlacement(host, site, here.limits, here.container)
        host.disconnect()


def start_hanging_attempt(placement: Placement, tmp_path: Path, **spec: Any) -> Assignment:
    """An attempt in a container that hangs at its second step."""
    bundle = drill_bundle(tmp_path / "bundle", fail_at=1, how="hang", **spec)
    attempt = stage(placement, assigned(tmp_path), bundle)
    placement.start(attempt)
    home_has(placement, attempt, "runtime/events.jsonl")
    return attempt


def test_container_is_restricted_hides_secrets_and_ends_with_its_worker(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY_TOKEN", CANARY)
    placement = docker_placement(program, tmp_path, memory="512m", shared_memory="64m")
    attempt = start_hanging_attempt(placement, tmp_path, secrets=("CANARY_TOKEN",), tell="CANARY_TOKEN")
    (container,) = container_ids(program)
    (details,) = json.loads(program("inspect", container))
    task = working(attempt)[-1]
    environment = Path(f"/proc/{task}/environ").read_bytes().split(b"\0")
    assert f"CANARY_TOKEN={CANARY}".encode() in environment
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{task}/status").read_text().splitlines())
    assert (int(status["CapBnd"], 16), int(status["CapEff"], 16), status["NoNewPrivs"]) == (0, 0, "1")
    limits = details["HostConfig"]
    assert limits["ReadonlyRootfs"] and limits["Memory"] == 512 << 20 and limits["PidsLimit"] == 4096
    assert limits["ShmSize"] == 64 << 20
    written = {mount["Destination"] for mount in details["Mounts"] if mount["RW"]}
    workspace = tmp_path / "workspace"
    assert written == {
        str(workspace / "01DRILL" / "1"),
        str(workspace / ".environments" / program.image.removeprefix("sha256:")[:16]),
    }
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        assert command.parent.name == str(os.getpid()) or CANARY.encode() not in _bytes(command)
    for root in (program.path.parent, workspace, attempt.directory):
        for path in root.rglob("*"):
            assert CANARY.encode() not in _bytes(path), path  # including the daemon's own container files
    record = read_container(attempt.directory)
    assert record is not None and record.image_id == program.image

    claim = look(placement, attempt).claim
    assert claim is not None
    os.kill(claim.pid, signal.SIGKILL)
    wait_for(lambda: not working(attempt), "the end of the orphaned task")  # before any look
    until(lambda: look(placement, attempt).worker is Presence.ABSENT, "an absent worker")
    assert container_ids(program) == []
    assert placement.stop(attempt)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.is_file() and not path.is_symlink() else b""
    except OSError:
        return b""


SILENT = 'echo "Cannot connect to the Docker daemon" >&2; exit 1'


@only_docker
def test_unreachable_daemon_means_unknown_and_stop_removes_orphaned_container(
    program: Program, tmp_path: Path
) -> None:
    placement = docker_placement(program, tmp_path)
    attempt = start_hanging_attempt(placement, tmp_path)
    (container,) = container_ids(program)
    program("pause", container)  # so that the container cannot react
    claim = look(placement, attempt).claim
    assert claim is not None
    with program.fault("ps", SILENT):
        os.kill(claim.pid, signal.SIGKILL)
        assert look(placement, attempt).worker is Presence.UNKNOWN
        assert not placement.stop(attempt)
        with pytest.raises(WorkFailedError, match="still runs"):
            placement.remove(attempt)
        assert container_ids(program.without_faults) == [container]
    assert placement.stop(attempt) and container_ids(program) == [] and not working(attempt)
    assert look(placement, attempt).worker is Presence.ABSENT
    placement.remove(attempt)


@only_docker
def test_failed_container_start_reports_cause_and_leaves_no_container(
    program: Program, tmp_path: Path
) -> None:
    bundle = drill_bundle(tmp_path / "bundle", gate=str(tmp_path / "never"))

    def verdict(number: int, placement: Placement) -> Any:
        attempt = stage(placement, assigned(tmp_path, number), bundle)
        placement.start(attempt)
        runtime = tmp_path / "workspace" / attempt.run_id / str(number) / "runtime"
        wait_for((runtime / "result.json").exists, "a verdict")
        assert container_ids(program) == []  # before any look
        return ended(placement, attempt).verdict

    placement = docker_placement(program, tmp_path)
    silent = stage(placement, assigned(tmp_path), bundle)
    with program.fault("ps", SILENT), pytest.raises(WorkFailedError, match="Cannot connect to the Docker"):
        placement.start(silent)
    assert placement.stop(silent)  # never started, and cannot start any more

    missing = verdict(2, docker_placement(program, tmp_path, image=f"sha256:{'0' * 64}"))
    assert missing.cause == "start_failed" and "0000" in missing.message
    nowhere = verdict(3, docker_placement(program, tmp_path, python="/nowhere/python"))
    assert nowhere.cause == "start_failed" and "/nowhere/python" in nowhere.message
    with program.fault("create", '$program "$@" > /dev/null; exit 1'):  # created, but the answer is lost
        assert verdict(4, placement).cause == "start_failed"
    with program.fault("start", '$program "$@" & sleep 2; kill -9 $!; exit 1'):  # the client is killed
        assert verdict(5, placement).cause in {"start_failed", "runner_died"}

    uv = placement.site.model_copy(
        update={"installed": False, "environment": {"PERILUNE_INSTALLER": "uv", "PATH": "/bin"}}
    )
    bare = verdict(6, RemotePlacement(LocalHost(), uv, AttemptLimits(), placement.container))
    assert bare.cause == "request_error" and "uv is not on PATH" in bare.message
    kept = tmp_path / "workspace" / ".environments" / program.image.removeprefix("sha256:")[:16]
    assert list(kept.glob("environments/*/bin/python"))  # the next attempt reuses this environment
    small = verdict(7, docker_placement(program, tmp_path, memory="12m"))
    assert (small.cause, small.message) == (
        "out_of_memory",
        "the kernel killed its container because it ran out of memory",
    )
