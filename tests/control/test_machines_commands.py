"""The commands for rented machines: list, show, rm, reap, cost and panic."""

import json
from pathlib import Path

import pytest
from cloud_cases import bill, end, rented, tend_until
from drill_cases import Command

from perilune.control.machines.lifecycle import Fleet
from perilune.control.record.transitions import MachineState
from perilune.control.runs.experiments import Control
from perilune.execution.providers.fake.client import FakeCloud
from perilune.execution.providers.fake.weather import Fault
from perilune.execution.providers.protocol import MachineRequest


def test_machines_list_show_and_rm(
    control: Control, fleet: Fleet, cloud: FakeCloud, perilune: Command
) -> None:
    assert perilune("machines", "list")[1] == "no machines are rented\n"
    key = rented(control, fleet)
    tend_until(fleet, key, MachineState.READY)
    code, out, _ = perilune("machines", "list", "--json")
    (listed,) = json.loads(out)["machines"]
    assert (code, listed["key"], listed["state"], listed["price"]) == (0, key, "ready", 0.4)
    assert 0 < listed["cost"] < listed["promised"] <= 1.0
    assert key in perilune("machines", "list")[1]
    text = perilune("machines", "show", key[-8:])[1]
    assert "for        attempt 1 of run 01RUN" in text and "machine.ready" in text

    code, _, err = perilune("machines", "rm", key)
    assert code == 2 and "perilune cancel 01RUN" in err and bill(cloud)["alive"] == [key]
    assert "attempt 1 of run 01RUN needs it: it is ready" in err
    cloud.inject(call="terminate", fault=Fault.ERROR_BEFORE, times=10**6)
    code, out, _ = perilune("machines", "rm", key, "--force", "--json")
    assert code == 0 and json.loads(out)["state"] == "terminating"
    code, out, _ = perilune("machines", "rm", key)  # again, without --force
    assert code == 0 and out.startswith(f"{key}: terminating, not proven gone yet;")
    cloud.inject(call="terminate", fault=Fault.ERROR_BEFORE, times=0)
    tend_until(fleet, key, MachineState.GONE)
    assert perilune("machines", "rm", key)[:2] == (0, f"{key}: gone\n")
    assert not bill(cloud)["alive"]
    assert "no machine 'nonsense'" in perilune("machines", "show", "nonsense")[2]


def test_machines_not_proven_gone_are_reported_with_their_cost(
    control: Control, fleet: Fleet, cloud: FakeCloud, perilune: Command
) -> None:
    key = rented(control, fleet)
    tend_until(fleet, key, MachineState.READY)
    cloud.inject(call="terminate", fault=Fault.ERROR_BEFORE, times=10**6)
    end(control)
    code, _, err = perilune("runs")
    assert code == 0 and f"machine {key} is not proven gone; it has cost" in err
    code, out, _ = perilune("machines", "reap", "--json")
    assert code == 1 and [row["key"] for row in json.loads(out)["terminating"]] == [key]
    costs = json.loads(perilune("cost", "--json")[1])
    assert costs["not_proven_gone"] == costs["alive"] == 1 and costs["per_hour"] == 0.4
    cloud.inject(call="terminate", fault=Fault.ERROR_BEFORE, times=0)
    assert perilune("machines", "reap", "--wait", "20")[:2] == (0, "no machine is left to terminate\n")
    text = perilune("cost")[1]
    assert "0 per hour for 0 machines" in text and f"run {'01RUN'}" in text


def test_reap_terminates_machines_missing_from_record(
    control: Control, fleet: Fleet, cloud: FakeCloud, perilune: Command
) -> None:
    stray = fleet.machine_key("01LOST", 3)
    cloud.create(stray, MachineRequest("small", 600.0))
    assert perilune("machines", "reap")[1] == "no machine is left to terminate\n" and bill(cloud)["alive"]
    code, out, _ = perilune("machines", "reap", "--grace", "0", "--wait", "20")
    assert code == 0 and out.startswith(f"{stray}: was not recorded here") and not bill(cloud)["alive"]


@pytest.mark.parametrize("silent", [False, True])
def test_panic_reports_ended_machines_and_silent_providers(
    control: Control, fleet: Fleet, cloud: FakeCloud, perilune: Command, silent: bool, tmp_path: Path
) -> None:
    tend_until(fleet, rented(control, fleet), MachineState.READY)
    if silent:
        cloud.inject(call="list", fault=Fault.ERROR_BEFORE, times=1)
        code, out, _ = perilune("panic", "--patience", "0")
        assert code == 1 and "no answer from fake" in out
    code, out, _ = perilune("panic", "--json")
    report = json.loads(out)
    assert code == 0 and len(report["ended"]) == 1 and not report["left"] and not bill(cloud)["alive"]


def test_panic_ends_recorded_machines_and_names_unreachable_ones(
    control: Control, fleet: Fleet, cloud: FakeCloud, perilune: Command
) -> None:
    """Panic finds machines through the record without the `cluster` file, but not without their provider."""
    keys = [rented(control, fleet, number=number) for number in (1, 2)]
    for key in keys:
        tend_until(fleet, key, MachineState.READY)
    (control.home.root / "cluster").unlink()
    assert tend_until(fleet, keys[0], MachineState.READY).missing_since is None  # not counted as gone
    providers = control.home.root / "providers.yaml"
    rents = providers.read_text()
    for text, name in (("daily_cap: 1\nproviders: {}\n", "'fake'"), ("providers: 7", "providers.yaml")):
        providers.write_text(text)
        code, out, _ = perilune("panic", "--patience", "0.3")
        assert code == 1 and name in out and bill(cloud)["alive"]
        assert all(f"unreachable: {key}" in out for key in keys)
    providers.write_text(rents)
    code, out, _ = perilune("panic")
    assert code == 0 and out.startswith("2 machines are proven gone") and not bill(cloud)["alive"]

    (control.home.root / "cluster").unlink()
    control.store.close()
    control.home.database.write_bytes(b"not a database")
    code, out, _ = perilune("panic", "--patience", "0.3")
    assert code == 1 and "no answer from cluster" in out
    control.home.database.unlink()
