"""Description of the machine: this one, and containers with CPU and memory limits."""

import json
import os
import platform
from pathlib import Path

import psutil
import pytest

from perilune.bundle.machine import (
    ControlGroupLimits,
    control_group_limits,
    describe_machine,
    observe_machine,
    usable_threads,
)
from perilune.execution.providers.ray.cluster.folders import CORES, environment

GIB = 2**30


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_observe_machine_describes_this_machine():
    machine = observe_machine()
    processor = machine.processor
    assert machine.system == platform.system()
    assert 0 < processor.usable_cores <= processor.logical_cores == psutil.cpu_count()
    assert 0 < machine.memory.usable <= machine.memory.total == psutil.virtual_memory().total
    assert processor.model
    if platform.machine() == "x86_64" and platform.system() == "Linux":
        assert "sse4_2" in processor.simd


def test_describe_machine_is_repeatable_and_json():
    assert describe_machine() == describe_machine()
    assert json.loads(json.dumps(describe_machine()))["processor"]["model"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_cpu_affinity_limits_usable_cores():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert observe_machine().processor.usable_cores <= 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_cores_reserved_by_ray_limit_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray reserves cores without a control group or an affinity."""
    monkeypatch.delenv(CORES, raising=False)
    assert CORES not in environment("/home")
    monkeypatch.setattr(os, "environ", environment("/home", 1.5))
    assert observe_machine().processor.usable_cores <= 1.5
    assert usable_threads() == 1


def test_cgroup_v2_takes_lowest_limit_of_enclosing_groups(tmp_path):
    root = write_files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/job.scope\n",
            "sys/fs/cgroup/user.slice/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/user.slice/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/job.scope/cpu.max": "max 100000\n",
            "sys/fs/cgroup/user.slice/job.scope/memory.max": f"{4 * GIB}\n",
        },
    )
    assert control_group_limits(root) == ControlGroupLimits(cores=1.5, memory=4 * GIB)


def test_cgroup_v1_reads_limits_when_group_path_exists_only_on_host(tmp_path):
    root = write_files(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n1:name=systemd:/docker/a\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert control_group_limits(root) == ControlGroupLimits(cores=0.5, memory=2 * GIB)


def test_cgroup_without_limit_gives_none(tmp_path):
    assert control_group_limits(tmp_path) == ControlGroupLimits(None, None)
    root = write_files(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n3:cpu:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert control_group_limits(root) == ControlGroupLimits(None, None)


@pytest.mark.gpu
def test_observe_machine_lists_gpus_that_torch_sees():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device and a CUDA build of torch")
    pytest.importorskip("pynvml", reason="pip install 'perilune[gpu]'")
    assert torch.cuda.get_device_name(0) in [gpu.name for gpu in observe_machine().gpus]
