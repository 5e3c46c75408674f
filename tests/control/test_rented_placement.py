"""The placement conformance suite on rented machines."""

from pathlib import Path

import pytest
from cloud_cases import LEASE, rented, tend_until
from hosts_cases import interpreter
from placement_conformance import PlacementConformance

from perilune.control.machines.lifecycle import Fleet
from perilune.control.record.transitions import MachineState
from perilune.control.runs.experiments import Control
from perilune.control.runs.templates import RentedTarget, Template
from perilune.execution.placements.protocol import Placement
from perilune.execution.placements.remote import Site


class TestRented(PlacementConformance):
    @pytest.fixture
    def placement(self, control: Control, fleet: Fleet, tmp_path: Path) -> Placement:
        """A placement with one machine for each attempt of the suite."""
        for run_id, number in (("01DRILL", 1), ("01DRILL", 2), ("01NEVER", 1)):
            key = rented(control, fleet, number=number, run_id=run_id)
            tend_until(fleet, key, MachineState.READY)
        site = Site(python=str(interpreter(tmp_path / "python", grace=1.0)), installed=True)
        target = RentedTarget(name="rented", provider="fake", kind="small", lease=LEASE, site=site)
        return control.reconciler.placements.build(Template(placement=target, bring="all"))
