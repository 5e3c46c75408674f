"""The launcher `docker`, with real containers, on every placement that has one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from container_cases import SOURCE, Program, docker, podman
from drill_cases import INSTALLED
from placement_conformance import PlacementConformance

from perilune.execution.hosts.local import LocalHost
from perilune.execution.limits import Limits
from perilune.execution.placements import Placement
from perilune.execution.placements.remote import RemotePlacement, Site

pytestmark = pytest.mark.xdist_group("containers")


@pytest.fixture(scope="module", params=["docker", "podman"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    folder = tmp_path_factory.mktemp("containers") / request.param
    with {"docker": docker, "podman": podman}[request.param](folder) as running:
        yield running


@pytest.fixture
def placement(program: Program, tmp_path: Path) -> Placement:
    environment = {"PYTHONPATH": f"{INSTALLED}{os.pathsep}{SOURCE}", "OMP_NUM_THREADS": "1"}
    site = Site(installed=True, workspace=str(tmp_path / "workspace"), environment=environment)
    return RemotePlacement(LocalHost(), site, Limits(), program.container(tmp_path))


class TestContainers(PlacementConformance):
    pass
