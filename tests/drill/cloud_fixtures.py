"""Fixtures: a fake cloud in its own process, and a home that rents from it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cloud_cases import bill, hurry, rent_from

from perilune.control.machines.lifecycle import Fleet
from perilune.control.machines.rented import RentedPlacement
from perilune.control.runs import reconcile
from perilune.control.runs.experiments import Control
from perilune.execution.placements.protocol import Capabilities
from perilune.execution.providers.fake.client import FakeCloud
from perilune.execution.providers.fake.process import start, stop
from perilune.execution.providers.fake.weather import Weather


@pytest.fixture
def weather() -> Weather:
    return Weather()


@pytest.fixture
def cloud(tmp_path: Path, weather: Weather) -> Iterator[FakeCloud]:
    """A cloud in its own process; teardown kills all its machines."""
    process = start(tmp_path / "cloud", weather)
    client = FakeCloud(tmp_path / "cloud")
    yield client
    for key in bill(client)["alive"]:
        client.call("POST", "/faults", {"key": key, "fault": "host_death"})
    stop(process)


@pytest.fixture
def fleet(control: Control, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    hurry(monkeypatch)
    # Short runs need frequent observations.
    monkeypatch.setattr(RentedPlacement, "capabilities", Capabilities(is_remote=True, look_interval_s=0.1))
    monkeypatch.setattr(reconcile, "MAX_PAUSE_S", 0.3)
    rent_from(control.home.root, cloud.folder)
    return control.reconciler.rentals.fleet
