"""Samples the load of the machine and of one process tree once a second, as JSON lines.

nvidia-ml-py adds the figures of GPUs if it is installed.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil

from perilune.files import append_json_line


class HardwareSampler:
    """Appends one line of figures to a file every `interval` seconds, from a thread, until stopped.

    A context manager. Sampling never stops the work that it watches: unreadable figures are omitted, and if
    the file cannot be written sampling ends with the reason in `error`.

    Args:
        pid: root of the process tree to watch; None to watch only the machine.
        interval: seconds between two lines.
    """

    def __init__(self, path: Path, pid: int | None = None, interval: float = 1.0) -> None:
        self.path = path
        self.interval = interval
        self.error: OSError | None = None
        self._tree = _ProcessTree(pid) if pid is not None else None
        self._gpus = _Gpus()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hardware", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._gpus.close()

    def _run(self) -> None:
        psutil.cpu_percent(percpu=True)  # the first reading only sets the baseline
        due = time.monotonic() + self.interval
        while not self._stopped.wait(max(0.0, due - time.monotonic())):
            due = max(due + self.interval, time.monotonic())
            if not self._append():
                return
        self._append()

    def _append(self) -> bool:
        try:
            append_json_line(self.path, self.sample())
        except OSError as error:
            self.error = error
            return False
        return True

    def sample(self) -> dict[str, Any]:
        """Measure all values: sizes in bytes, utilisation in percent, `time` in seconds since the epoch.

        cpu_percent (all cores, 0 to 100), cpu_per_core, load (1, 5, 15 minutes), memory_used,
        memory_total, swap_used, disk_free (where the file lies), disk_read and disk_write (since boot),
        tree: {processes, rss, cpu_percent (of one core), rss_by_pid}, gpus: [{...}].
        """
        figures: dict[str, Any] = {"time": time.time(), "load": list(os.getloadavg()), **_machine()}
        figures["disk_free"] = _disk_free(self.path.parent)
        if self._tree is not None:
            figures["tree"] = self._tree.sample()
        gpus = self._gpus.sample()
        if gpus:
            figures["gpus"] = gpus
        return figures


def _disk_free(directory: Path) -> int | None:
    try:
        room = os.statvfs(directory)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize


def _machine() -> dict[str, Any]:
    cores = psutil.cpu_percent(percpu=True)
    memory = psutil.virtual_memory()
    figures = {
        "cpu_percent": round(sum(cores) / len(cores), 1) if cores else None,
        "cpu_per_core": cores,
        "memory_used": memory.total - memory.available,
        "memory_total": memory.total,
        "swap_used": psutil.swap_memory().used,
    }
    disk = psutil.disk_io_counters()
    if disk is not None:
        figures |= {"disk_read": disk.read_bytes, "disk_write": disk.write_bytes}
    return figures


class _ProcessTree:
    """A process and its descendants. Keeps the process objects, because CPU figures are differences."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._known: dict[int, psutil.Process] = {}

    def sample(self) -> dict[str, Any]:
        sizes: dict[str, int] = {}
        percent = 0.0
        for process in self._processes():
            try:
                with process.oneshot():
                    percent += process.cpu_percent()
                    sizes[str(process.pid)] = process.memory_info().rss
            except psutil.Error:  # it ended just now
                self._known.pop(process.pid, None)
        return {
            "processes": len(sizes),
            "rss": sum(sizes.values()),
            "cpu_percent": round(percent, 1),
            "rss_by_pid": sizes,
        }

    def _processes(self) -> list[psutil.Process]:
        try:
            root = self._known.get(self._pid) or psutil.Process(self._pid)
            if not root.is_running():  # its pid may belong to another process now
                return []
            processes = [root, *root.children(recursive=True)]
        except psutil.Error:
            return []
        self._known = {process.pid: self._known.get(process.pid, process) for process in processes}
        return list(self._known.values())


class _Gpus:
    """NVIDIA devices through nvidia-ml-py (module pynvml), if the library and the driver are present."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._devices: list[Any] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            self._devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            self._nvml = pynvml
        except Exception:  # no library, no driver, no device: nothing to report
            self._devices = []

    def sample(self) -> list[dict[str, Any]]:
        return [self._device(index, device) for index, device in enumerate(self._devices)]

    def _device(self, index: int, device: Any) -> dict[str, Any]:
        nvml = self._nvml
        readings: dict[str, Callable[[], Any]] = {
            "utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu,
            "memory_used": lambda: nvml.nvmlDeviceGetMemoryInfo(device).used,
            "memory_total": lambda: nvml.nvmlDeviceGetMemoryInfo(device).total,
            "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000,
            "temperature": lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
        }
        figures: dict[str, Any] = {"index": index}
        for name, read in readings.items():
            try:
                figures[name] = read()
            except nvml.NVMLError:  # not supported by this device
                continue
        return figures

    def close(self) -> None:
        if self._devices:
            self._devices = []
            self._nvml.nvmlShutdown()
