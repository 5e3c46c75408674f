"""Every placement through the same tests: this machine, and a machine behind a real sshd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_cases import interpreter
from placement_conformance import PlacementConformance
from sshd_cases import Sshd, sshd

from perilune.execution.hosts.ssh import SshHost
from perilune.execution.limits import Limits
from perilune.execution.placements import Placement
from perilune.execution.placements.local import LocalPlacement
from perilune.execution.placements.remote import RemotePlacement, Site

pytestmark = pytest.mark.xdist_group("sshd")


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
        yield RemotePlacement(host, site, Limits())
        host.disconnect()
