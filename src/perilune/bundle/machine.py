"""Constant facts about this machine: processor, memory and GPUs.

Cores are counted in three ways, because the counts differ in containers: the cores of the machine, those that
this process may be scheduled on (affinity), and those that its control groups allow. More threads than the
last count only wait for each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.bundle.job import Resources
    from perilune.bundle.plugin import MemoryNeed

Need = TypeVar("Need", bound="MemoryNeed")

# Instruction sets that numerical libraries choose kernels by, so they affect the last bits of results.
_SIMD = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "sme"),
)


@dataclass(frozen=True, slots=True)
class Processor:
    """The CPU. `usable_cores` is limited by affinity, control groups and Ray; a fraction is a quota."""

    model: str
    architecture: str
    physical_cores: int
    logical_cores: int
    usable_cores: float
    simd: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """Main memory in bytes; `usable` is the smaller of the machine's and its control groups' limit."""

    total: int
    usable: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA device as its driver reports it; `memory` in bytes."""

    name: str
    memory: int
    driver: str
    compute_capability: str


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine and its operating system."""

    system: str
    kernel: str
    libc: str
    processor: Processor
    memory: Memory
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class ControlGroupLimits:
    """Limits of control groups on cores and bytes; None for no limit."""

    cores: float | None
    memory: int | None


def describe_machine() -> dict[str, Any]:
    """Return the result of `observe_machine` as JSON."""
    facts: dict[str, Any] = json.loads(json.dumps(asdict(observe_machine())))
    return facts


CORES = "PERILUNE_CORES"  # variable: CPU cores that Ray has reserved for this process's machine


def observe_machine() -> Machine:
    """Observe the machine, in a few milliseconds. Never raises for an unknown fact."""
    import psutil

    limits = control_group_limits()
    logical = psutil.cpu_count(logical=True) or 1
    total = psutil.virtual_memory().total
    reserved = float(os.environ.get(CORES, "inf"))
    cores = min(float(_cores_by_affinity(logical)), reserved)
    return Machine(
        system=platform.system(),
        kernel=platform.release(),
        libc=" ".join(platform.libc_ver()).strip(),
        processor=Processor(
            model=_processor_model(),
            architecture=platform.machine(),
            physical_cores=psutil.cpu_count(logical=False) or logical,
            logical_cores=logical,
            usable_cores=cores if limits.cores is None else min(cores, limits.cores),
            simd=_simd(),
        ),
        memory=Memory(total, total if limits.memory is None else min(total, limits.memory)),
        gpus=tuple(_nvidia_gpus()),
    )


def require_memory(need: Need, resources: Resources) -> Need:
    """Return `need` if this machine has that much memory.

    Raises:
        RequestError: with both amounts, and the change that makes the stage fit if one is known.
    """
    machine = observe_machine()
    name, available = "this machine", machine.memory.usable
    if resources.device != "cpu" and (machine.gpus or Path("/dev/nvidia0").exists()):
        if not machine.gpus:  # the driver does not report the memory
            return need
        name, available = f"the {machine.gpus[0].name}", machine.gpus[0].memory
    else:  # sharded processes too have a whole copy of the weights and an engine each
        available //= resources.processes
    if need.total > available:
        each = " for each process" if resources.processes > 1 else ""
        raise RequestError(
            f"the stage needs {need}; {name} has {available / 2**30:.1f} GiB{each}",
            where="memory",
            remedy=need.fitting(available) or "use a smaller model, or a machine with more memory",
        )
    return need


def require_device(resources: Resources) -> None:
    """Check that this machine has the device that a stage requests.

    Raises:
        RequestError: when it has no GPU and one is requested.
    """
    if resources.device == "cuda" and not (observe_machine().gpus or Path("/dev/nvidia0").exists()):
        raise RequestError(
            "the recipe requests device cuda, and this machine has none",
            where="resources.device",
            remedy="--set resources.device=cpu, or --template for a machine with a GPU",
        )


def usable_threads() -> int:
    """Return the useful number of threads: usable cores rounded down, at least 1."""
    processor = observe_machine().processor
    return max(1, int(min(processor.usable_cores, processor.physical_cores)))


def control_group_limits(root: Path = Path("/")) -> ControlGroupLimits:
    """Return the lowest core and memory limits of this process's control groups, version 1 or 2.

    Limits may be set on the group or on any of its ancestors. In a container, the path in /proc/self/cgroup
    may exist only on the host; the mounted root is then used.

    Args:
        root: the folder that contains /proc and /sys.
    """
    cores: list[float] = []
    memory: list[int] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
            for group in _enclosing(mount, path):
                quota, period = _cpu_quota(group)
                if quota > 0 and period > 0:
                    cores.append(quota / period)
                for name in ("memory.max", "memory.limit_in_bytes"):
                    limit = _read(group / name).strip()
                    # Version 1 uses a number near 2^63 for "no limit".
                    if limit.isdigit() and int(limit) < 2**60:
                        memory.append(int(limit))
    return ControlGroupLimits(min(cores, default=None), min(memory, default=None))


def _enclosing(mount: Path, path: str) -> Iterator[Path]:
    group = Path(path.lstrip("/"))
    yield from (mount / part for part in (group, *group.parents) if ".." not in part.parts)


def _cpu_quota(group: Path) -> tuple[int, int]:
    """Return the CPU time per period and the period, in microseconds; (0, 0) without a limit."""
    words = _read(group / "cpu.max").split() or [
        _read(group / "cpu.cfs_quota_us").strip(),
        _read(group / "cpu.cfs_period_us").strip(),
    ]
    if len(words) == 2 and all(word.isdigit() for word in words):
        return int(words[0]), int(words[1])
    return 0, 0  # "max" or -1: unlimited


def _cores_by_affinity(logical: int) -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else logical


def _processor_model() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.lower().startswith("model name"):
            return line.partition(":")[2].strip()
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return platform.processor() or platform.machine()


def _simd() -> tuple[str, ...]:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        name, _, flags = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            present = set(flags.split())
            return tuple(flag for flag in _SIMD if flag in present)
    return ("asimd",) if platform.machine() == "arm64" else ()


def _nvidia_gpus() -> Iterator[Gpu]:
    try:
        import pynvml
    except ImportError:
        return
    with contextlib.suppress(pynvml.NVMLError):  # no driver, or an unsupported one
        pynvml.nvmlInit()
        try:
            driver = pynvml.nvmlSystemGetDriverVersion()
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
                yield Gpu(
                    name=pynvml.nvmlDeviceGetName(handle),
                    memory=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    driver=driver,
                    compute_capability=f"{major}.{minor}",
                )
        finally:
            pynvml.nvmlShutdown()


def _read(path: Path) -> str:
    """Return the text of the file; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
