"""Resource limits of untrusted code, and functions that apply limits to the current process."""

import resource
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one run of untrusted code.

    Attributes:
        seconds: wall clock, after which all processes are killed.
        cpu_seconds: CPU time of each process.
        memory_bytes: address space of each process beyond Python's own, and resident memory of all together.
        processes: simultaneous processes and threads, including the first.
        open_files: descriptors of each process.
        scratch_bytes: size of the scratch folder and of each file.
        scratch_files: files and folders in the scratch folder.
        output_bytes: output that is kept, half from the beginning and half from the end.
        flood_bytes: output after which the run is killed.
    """

    seconds: float = 5.0
    cpu_seconds: int = 5
    memory_bytes: int = 256 << 20
    processes: int = 8
    open_files: int = 32
    scratch_bytes: int = 8 << 20
    scratch_files: int = 128
    output_bytes: int = 16 << 10
    flood_bytes: int = 32 << 20


def lower_limit(kind: int, value: int) -> None:
    """Lower a resource limit (`resource.RLIMIT_*`) of this process for good. A lower limit stays."""
    _, hard = resource.getrlimit(kind)
    bounded = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (bounded, bounded))


def allow_cpu(seconds: float) -> None:
    """Grant this process CPU time from now on. The kernel enforces it even if the parent process is gone."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime + seconds) + 1, hard))
