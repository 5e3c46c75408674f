"""The launcher `docker`, with real containers: Docker through the tests of every placement, Podman
through the hardest of its own; and Docker failing, which a program before it brings about.
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
from perilune.execution.launchers.docker import container_of
from perilune.execution.limits import AttemptLimits
from perilune.execution.placements import Assignment, Placement
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


def placed(program: Program, tmp_path: Path, **settings: Any) -> RemotePlacement:
    environment = {"PYTHONPATH": f"{INSTALLED}{os.pathsep}{SOURCE}", "OMP_NUM_THREADS": "1"}
    site = Site(installed=True, workspace=str(tmp_path / "workspace"), environment=environment)
    return RemotePlacement(LocalHost(), site, AttemptLimits(), program.container(tmp_path, **settings))


def left(program: Program) -> list[str]:
    return program("ps", "--all", "--quiet", "--no-trunc").split()


@only_docker
class TestDockerOverSsh(PlacementConformance):
    @pytest.fixture
    def placement(self, program: Program, server: Sshd, tmp_path: Path) -> Iterator[Placement]:
        host = SshHost(server.settings(), tmp_path / "keys")
        here = placed(program, tmp_path)
        site = here.site.model_copy(update={"workspace": str(tmp_path / "a workspace")})
        yield RemotePlacement(host, site, here.limits, here.container)
        host.disconnect()


def hanging(placement: Placement, tmp_path: Path, **spec: Any) -> Assignment:
    """An attempt in a container that hangs at its second step."""
    bundle = drill_bundle(tmp_path / "bundle", fail_at=1, how="hang", **spec)
    attempt = stage(placement, assigned(tmp_path), bundle)
    placement.start(attempt)
    home_has(placement, attempt, "runtime/events.jsonl")
    return attempt


def test_what_a_container_may_do_and_what_is_known_of_it(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY_TOKEN", CANARY)
    placement = placed(program, tmp_path, memory="512m", shared_memory="64m")
    attempt = hanging(placement, tmp_path, secrets=("CANARY_TOKEN",), tell="CANARY_TOKEN")
    (container,) = left(program)
    (found,) = json.loads(program("inspect", container))
    task = working(attempt)[-1]
    environment = Path(f"/proc/{task}/environ").read_bytes().split(b"\0")
    assert f"CANARY_TOKEN={CANARY}".encode() in environment
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{task}/status").read_text().splitlines())
    assert (int(status["CapBnd"], 16), int(status["CapEff"], 16), status["NoNewPrivs"]) == (0, 0, "1")
    limits = found["HostConfig"]
    assert limits["ReadonlyRootfs"] and limits["Memory"] == 512 << 20 and limits["PidsLimit"] == 4096
    assert limits["ShmSize"] == 64 << 20
    written = {mount["Destination"] for mount in found["Mounts"] if mount["RW"]}
    workspace = tmp_path / "workspace"
    assert written == {
        str(workspace / "01DRILL" / "1"),
        str(workspace / ".environments" / program.image.removeprefix("sha256:")[:16]),
    }
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        assert command.parent.name == str(os.getpid()) or CANARY.encode() not in _bytes(command)
    for root in (program.path.parent, workspace, attempt.directory):
        for path in root.rglob("*"):
            assert CANARY.encode() not in _bytes(path), path  # also in what the daemon keeps of containers
    record = container_of(attempt.directory)
    assert record is not None and record.image_id == program.image

    claim = look(placement, attempt).claim
    assert claim is not None
    os.kill(claim.pid, signal.SIGKILL)
    wait_for(lambda: not working(attempt), "the end of what nobody keeps")  # nobody has looked
    until(lambda: look(placement, attempt).worker is Presence.ABSENT, "its absence")
    assert left(program) == []
    assert placement.stop(attempt)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.is_file() and not path.is_symlink() else b""
    except OSError:
        return b""


SILENT = 'echo "Cannot connect to the Docker daemon" >&2; exit 1'


@only_docker
def test_silence_proves_nothing_and_what_outlived_its_keeper_is_ended(
    program: Program, tmp_path: Path
) -> None:
    placement = placed(program, tmp_path)
    attempt = hanging(placement, tmp_path)
    (container,) = left(program)
    program("pause", container)  # so that it cannot notice
    claim = look(placement, attempt).claim
    assert claim is not None
    with program.fault("ps", SILENT):
        os.kill(claim.pid, signal.SIGKILL)
        assert look(placement, attempt).worker is Presence.UNKNOWN
        assert not placement.stop(attempt)
        with pytest.raises(WorkFailedError, match="still runs"):
            placement.remove(attempt)
        assert left(program.unspoilt) == [container]
    assert placement.stop(attempt) and left(program) == [] and not working(attempt)
    assert look(placement, attempt).worker is Presence.ABSENT
    placement.remove(attempt)


@only_docker
def test_a_start_that_fails_is_told_and_leaves_nothing(program: Program, tmp_path: Path) -> None:
    bundle = drill_bundle(tmp_path / "bundle", gate=str(tmp_path / "never"))

    def verdict(number: int, placement: Placement) -> Any:
        attempt = stage(placement, assigned(tmp_path, number), bundle)
        placement.start(attempt)
        runtime = tmp_path / "workspace" / attempt.run_id / str(number) / "runtime"
        wait_for((runtime / "result.json").exists, "a verdict")
        assert left(program) == []  # before anybody has looked
        return ended(placement, attempt).verdict

    placement = placed(program, tmp_path)
    silent = stage(placement, assigned(tmp_path), bundle)
    with program.fault("ps", SILENT), pytest.raises(WorkFailedError, match="Cannot connect to the Docker"):
        placement.start(silent)
    assert placement.stop(silent)  # it has never begun, and cannot any more

    missing = verdict(2, placed(program, tmp_path, image=f"sha256:{'0' * 64}"))
    assert missing.cause == "start_failed" and "0000" in missing.message
    nowhere = verdict(3, placed(program, tmp_path, python="/nowhere/python"))
    assert nowhere.cause == "start_failed" and "/nowhere/python" in nowhere.message
    with program.fault("create", '$program "$@" > /dev/null; exit 1'):  # made, and the answer lost
        assert verdict(4, placement).cause == "start_failed"
    with program.fault("start", '$program "$@" & sleep 2; kill -9 $!; exit 1'):  # its client is killed
        assert verdict(5, placement).cause in {"start_failed", "runner_died"}

    uv = placement.site.model_copy(
        update={"installed": False, "environment": {"PERILUNE_INSTALLER": "uv", "PATH": "/bin"}}
    )
    bare = verdict(6, RemotePlacement(LocalHost(), uv, AttemptLimits(), placement.container))
    assert bare.cause == "request_error" and "uv is not on PATH" in bare.message
    kept = tmp_path / "workspace" / ".environments" / program.image.removeprefix("sha256:")[:16]
    assert list(kept.glob("environments/*/bin/python"))  # the next attempt finds what this one has made
    small = verdict(7, placed(program, tmp_path, memory="12m"))
    assert (small.cause, small.message) == (
        "out_of_memory",
        "the kernel killed its container because it ran out of memory",
    )
