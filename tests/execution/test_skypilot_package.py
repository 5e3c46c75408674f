"""The real SkyPilot without a cloud: how it parses our settings, and whether FakeSky matches it."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sky_cases import FakeSky

from perilune.execution.providers.protocol import MachineKey, ProviderRefusedError, ProviderUnreachableError
from perilune.execution.providers.skypilot import bridge
from perilune.execution.providers.skypilot.client import SkyPilot
from perilune.execution.providers.skypilot.clusters import LOST_NODES
from perilune.execution.providers.skypilot.skypilot_settings import SkyPilotSettings

PACKAGE = Path(sys.prefix) / "skypilot"  # where the Makefile puts it
CATALOGS = {
    "lambda/vms.csv": """
        InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice
        gpu_1x_a100,A100,1.0,30.0,200.0,1.29,us-east-1,,
        gpu_1x_a100,A100,1.0,30.0,200.0,1.49,us-west-1,,
        gpu_8x_a100,A100,8.0,124.0,1800.0,10.32,us-east-1,,""",
    "aws/vms.csv": """
        InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone,Arch
        p4d.24xlarge,A100,8.0,96.0,1152.0,,32.77,9.83,us-east-1,use1-az1,x86_64
        p4d.24xlarge,A100,8.0,96.0,1152.0,,34.77,,us-west-2,usw2-az1,x86_64""",
    "common/accelerators.csv": "AcceleratorName,Clouds\nA100,\"{'Lambda', 'AWS'}\"\n",
    "common/metadata.csv": "GPU,MemoryGB,Manufacturer,Clouds\nA100,40,NVIDIA,\"['Lambda', 'AWS']\"\n",
}
A100 = {"infra": "lambda", "accelerators": "A100:1"}
P4D = {"infra": "aws", "instance_type": "p4d.24xlarge"}
SAID = [  # resources, the expected problem, the highest price in the catalog
    (A100, "", 1.49),
    ({**A100, "infra": "lambda/us-east-1"}, "", 1.29),
    ({**A100, "accelerators": "A100:3"}, "Lambda has no machine with {'A100': 3}", None),
    ({**A100, "accelerators": "A1O0:1"}, "Lambda has no machine with {'A1O0': 1}", None),
    ({"infra": "lambda", "instance_type": "gpu_8x_a100"}, "", 10.32),
    ({"infra": "lambda", "instance_type": "gpu_9x_a100"}, "Invalid instance type 'gpu_9x_a100'", None),
    ({"infra": "lambda/mars", "instance_type": "gpu_8x_a100"}, "Invalid region 'mars'", None),
    (P4D, "", 34.77),
    ({**P4D, "use_spot": True, "disk_size": 200, "image_id": "docker:ubuntu:24.04"}, "", 9.83),
    ({"any_of": [{"infra": "aws"}, {"infra": "lambda"}], "accelerators": "A100:8"}, "", 34.77),
    ({"infra": "k8s", "cpus": "4+", "memory": "16+"}, "", None),
    ({"infra": "awz", "cpus": 2}, "Check problematic field(s): $.infra", None),
    ({"acelerators": "A100"}, "did you mean 'accelerators'", None),
    ({"cpus": 2, "use_spot": "maybe"}, "'maybe' is not of type 'boolean'", None),
    ({"cpus": "some"}, "some", None),
]
CALLS = ("launch", "down", "status", "get", "api_status", "api_cancel")
FACTS = Path(__file__).parents[1] / "drill" / "sky_facts.py"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python interpreter with SkyPilot, whose home has a price catalog."""
    if not PACKAGE.exists():
        pytest.skip("needs SkyPilot beside the environment: make .venv/.installed-dev")
    folder = tmp_path_factory.mktemp("skypilot")
    for name, text in CATALOGS.items():
        path = folder / ".sky" / "catalogs" / "v8" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line.strip() for line in text.strip().splitlines()) + "\n")
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec env HOME={folder} PYTHONPATH={PACKAGE} {sys.executable} "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture(scope="module")
def cloud(python: Path) -> Iterator[SkyPilot]:
    kinds = {f"kind-{number}": {"resources": wanted} for number, (wanted, *_) in enumerate(SAID)}
    settings = SkyPilotSettings.model_validate({"type": "skypilot", "python": str(python), "kinds": kinds})
    with SkyPilot(settings, python.parent / "keys") as cloud:
        yield cloud


@pytest.mark.parametrize("number", range(len(SAID)))
def test_machine_kind_is_validated_and_priced_without_a_cloud(cloud: SkyPilot, number: int) -> None:
    _, wrong, price = SAID[number]
    problem = cloud.problem(f"kind-{number}")
    assert wrong in problem and bool(wrong) == bool(problem)
    if price is not None:
        assert cloud._price(f"kind-{number}") == price
    else:
        with pytest.raises((ProviderRefusedError, ProviderUnreachableError)):
            cloud._price(f"kind-{number}")


def test_skypilot_parses_launched_task_with_expected_fields_only(cloud: SkyPilot) -> None:
    task = cloud._bridge.ask("check", task=cloud._task("kind-8", 3, minutes=61, price=9.0))["task"]
    text = task.pop("_user_specified_yaml")
    assert {key for key, value in task.items() if value} == {"name", "num_nodes", "resources"}
    assert (task["name"], task["num_nodes"]) == ("kind-8", 3) == (bridge.kind_of(text), 3)
    understood = task["resources"]
    assert understood["autostop"] == {"idle_minutes": 61, "down": True, "wait_for": "none"}
    assert understood["max_hourly_cost"] == 9.0 and understood["use_spot"] is True
    assert understood["instance_type"] == "p4d.24xlarge" and understood["disk_size"] == 200


@pytest.mark.thorough
def test_fake_sky_matches_calls_and_fields_of_skypilot(python: Path, tmp_path: Path) -> None:
    key = str(MachineKey("7kq2m0x9ab", "01JD0X5Z8V3K1M9Q2R4T6W7Y8Z", 12, 3))
    errors = bridge.REFUSALS | {"ResourcesUnavailableError", "ClusterDoesNotExist"}
    real, more = facts(python, CALLS, key, sorted(errors))
    fake, _ = facts(FakeSky(tmp_path / "sky").python, CALLS)
    for name in CALLS:
        theirs, ours = real["calls"].pop(name), fake["calls"].pop(name)
        assert set(ours) <= set(theirs) and ours[0] == theirs[0], name
    assert fake == real
    record, request, handle = fields_read_by_bridge()
    assert record <= set(more["record"]) and request <= set(more["request"]) and handle <= set(more["handle"])
    assert set(more["active"]) == bridge.ACTIVE and more["names"] == ["sky.launch", "sky.down"]
    assert (
        set(more["errors"]) == errors
        and LOST_NODES in more["source"]
        and more["ssh"] == "~/.sky/generated/ssh/{}"
    )
    assert more["on_gcp"].startswith("perilune-7kq2m0x9ab")  # findable in the cloud's console


def fields_read_by_bridge() -> tuple[set[str], set[str], set[str]]:
    """The fields that the bridge reads from a cluster's record, a request and a handle."""
    records: set[str] = set()
    handles: set[str] = set()
    attributes: set[str] = set()
    for node in ast.walk(ast.parse(Path(bridge.__file__).read_text())):
        match node:
            case ast.Subscript(value=ast.Name("record"), slice=ast.Constant(value=str() as name)):
                records.add(name)
            case ast.Call(
                func=ast.Attribute(value=ast.Name("record"), attr="get"), args=[ast.Constant(name), *_]
            ):
                records.add(name)
            case ast.Call(func=ast.Name("getattr"), args=[ast.Name("handle"), ast.Constant(name), *_]):
                handles.add(name)
            case ast.Attribute(value=ast.Name(), attr=name):
                attributes.add(name)
    requests = attributes & {"name", "status", "cluster_name", "request_id", "created_at"}
    assert len(records) >= 8 and len(handles) == 3 and len(requests) == 5
    return records, requests, handles


def facts(python: Path, *told: Any) -> Any:
    command = [str(python), str(FACTS), *map(json.dumps, told)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.strip().splitlines()[-1])
