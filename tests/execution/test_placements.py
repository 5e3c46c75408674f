"""Placement conformance tests on the local machine and on a machine behind a real sshd."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from drill_cases import drill_bundle
from hosts_cases import NearbyHost, interpreter, nearby
from placement_conformance import PlacementConformance, assigned, ended, home_has, look, stage, until
from sshd_cases import Sshd, sshd

from perilune.errors import RequestError, WorkFailedError
from perilune.execution.hosts.ssh import SshHost
from perilune.execution.limits import AttemptLimits
from perilune.execution.placements.local import LocalPlacement
from perilune.execution.placements.protocol import Placement
from perilune.execution.placements.remote import RemotePlacement, Site
from perilune.execution.processes import Presence, ProcessIdentity
from perilune.execution.verdict import Cause, find_cause

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sshd")]


class TestLocal(PlacementConformance):
    @pytest.fixture
    def placement(self) -> Placement:
        return LocalPlacement()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with sshd(tmp_path_factory.mktemp("ssh") / "sshd") as running:
        yield running


class TestSsh(PlacementConformance):
    @pytest.fixture
    def placement(self, server: Sshd, tmp_path: Path) -> Iterator[Placement]:
        host = SshHost(server.settings(), tmp_path / "keys")
        python = interpreter(tmp_path / "python")
        site = Site(python=str(python), installed=True, workspace=str(tmp_path / "a workspace"))
        yield RemotePlacement(host, site, AttemptLimits())
        host.disconnect()


def test_older_attempt_is_superseded_by_a_claimed_newer_one(tmp_path: Path) -> None:
    placement, bundle = nearby(tmp_path / "box"), drill_bundle(tmp_path / "bundle")
    old, new = assigned(tmp_path, 1), assigned(tmp_path, 2)
    stage(placement, old, bundle)
    stage(placement, new, bundle)
    assert placement.stop(new)  # claims it
    assert look(placement, old).superseded
    placement.start(old)
    with pytest.raises(WorkFailedError, match="a newer one has started on this machine"):
        stage(placement, old, bundle)
    placement.remove(new)
    assert look(placement, old).superseded  # the claim outlives the files
    assert not (tmp_path / "box" / "workspace" / "01DRILL" / "claim.1.json").exists()


def test_attempt_ends_with_the_process_that_holds_the_machine(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as lender:
        identity = ProcessIdentity.of(lender.pid)
        assert identity is not None
        lent = f"PERILUNE_HOLDER={identity.pid} {identity.starttime}"
        placement = nearby(tmp_path / "box", NearbyHost(["env", lent]))
        attempt = assigned(tmp_path)
        stage(placement, attempt, drill_bundle(tmp_path / "bundle", fail_at=1, how="daemon"))
        placement.start(attempt)
        home_has(placement, attempt, "runtime/daemon.pid")
        daemon = int((attempt.directory / "runtime" / "daemon.pid").read_text())
        assert look(placement, attempt).worker is Presence.PRESENT and ProcessIdentity.of(daemon)
        lender.kill()
    verdict = ended(placement, attempt).verdict
    assert verdict is not None and (verdict.cause, verdict.message) == (
        "stopped",
        "the machine was taken away",
    )
    until(lambda: ProcessIdentity.of(daemon) is None, "the end of its daemon")  # or a zombie


SMALL_DISK = 'mount -t tmpfs -o size=100k none "$0" && exec "$@"'


def test_full_remote_disk_raises_disk_full_error(tmp_path: Path) -> None:
    isolated = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs unshare(1) with user namespaces: sysctl kernel.unprivileged_userns_clone=1")
    (tmp_path / "box" / "workspace").mkdir(parents=True)
    host = NearbyHost([*isolated, "sh", "-c", SMALL_DISK, str(tmp_path / "box" / "workspace")])
    placement = nearby(tmp_path / "box", host)
    with pytest.raises(RequestError, match="disk is full") as full:
        stage(placement, assigned(tmp_path), drill_bundle(tmp_path / "bundle"))
    assert find_cause(full.value) is Cause.DISK_FULL


def test_workspace_that_cannot_be_made_is_refused_and_needs_no_cleanup(tmp_path: Path) -> None:
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "workspace").write_text("a file")
    placement = nearby(tmp_path / "box", NearbyHost(["env"]))
    with pytest.raises(RequestError, match=r"the workspace cannot be written .*Not a directory") as refused:
        stage(placement, assigned(tmp_path), drill_bundle(tmp_path / "bundle"))
    assert "placement.site.workspace" in refused.value.remedy
    assert placement.stop(assigned(tmp_path))
    placement.remove(assigned(tmp_path))


def test_missing_remote_python_is_refused_instead_of_unreachable(tmp_path: Path) -> None:
    site = Site(python=str(tmp_path / "nowhere"), workspace=str(tmp_path))
    host = NearbyHost(["env"])
    seen = RemotePlacement(host, site, AttemptLimits()).observe(assigned(tmp_path))
    assert seen.refused and "it has no" in seen.unseen
