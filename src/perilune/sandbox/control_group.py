"""A control group (cgroup) that limits the memory of a supervisor and all its runs together.

The supervisor enters the group once, and every run begins inside it, because moving each run would cost
milliseconds. At the limit the kernel kills a process of the run, never the supervisor, because runs have the
highest `oom_score_adj`; `memory.oom.group` would kill both. The supervisor then ends the run.

cgroup v1 and v2 differ in the names of files, and in one rule: in v2, a group with processes has no children
with the memory controller. So the new group is created in the nearest group, from this process's own upwards,
that passes the controller on. No other process is moved and no other group is changed.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_NAME = "perilune-sandbox-"  # then the supervisor's process id, and a random part
_OVERHEAD_BYTES = 16 << 20  # pages of Python that a run changes, and kernel memory of its namespaces
_HIGHEST_ADJUSTMENT = 500  # of at most 1000; with more, the kernel might kill the supervisor before its run


@dataclass(frozen=True, slots=True)
class _Version:
    """The names of one version of control groups.

    Attributes:
        kind: type of its file system.
        swap: file with the limit of swap; missing if the kernel does not account swap.
        swap_counts_memory: whether the limit of swap includes memory that is not swapped.
        kills: file with events, and the name of the event that counts processes killed at the limit.
    """

    kind: str
    limit: str
    swap: str
    swap_counts_memory: bool
    kills: tuple[str, str]


_VERSIONS = {
    1: _Version(
        "cgroup",
        "memory.limit_in_bytes",
        "memory.memsw.limit_in_bytes",
        True,
        ("memory.oom_control", "oom_kill"),
    ),
    2: _Version("cgroup2", "memory.max", "memory.swap.max", False, ("memory.events", "oom")),
}


class ControlGroup:
    """Creates a group with a memory limit, and moves this process into it.

    Args:
        memory_bytes: memory that runs may take.
        scratch_bytes: size of the scratch folder, whose files are in memory.

    Attributes:
        version: 1 or 2.
        folder: folder of the group.

    Raises:
        OSError: if this process may not create such a group. The message says why.
    """

    def __init__(self, memory_bytes: int, scratch_bytes: int) -> None:
        if (adjustment := int(_adjustment().read_text())) > _HIGHEST_ADJUSTMENT:
            raise OSError(f"oom_score_adj is {adjustment}, so the kernel might kill the supervisor first")
        _adjustment().write_text(str(adjustment))  # runs raise theirs
        self.version, mounted, self._came_from = own_group()
        self._names = _VERSIONS[self.version]
        limit = memory_bytes + scratch_bytes + _OVERHEAD_BYTES
        refused = []
        for parent in (self._came_from, *self._came_from.parents):
            if not parent.is_relative_to(mounted):
                break
            try:
                self.folder = self._create(parent, limit)
                return
            except OSError as error:
                refused.append(f"{parent}: {error.strerror or error}")
        raise OSError("; ".join(refused))

    def count_kills(self) -> int:
        """Return how often the kernel killed a process because the group was at its limit."""
        name, event = self._names.kills
        counts = dict(line.split() for line in (self.folder / name).read_text().splitlines())
        return int(counts[event])

    def leave(self) -> None:
        """Return to the group that this process came from, and remove this group."""
        with suppress(OSError):  # if the earlier group is gone, a later supervisor removes this one
            _enter(self._came_from)
            self.folder.rmdir()

    def _create(self, parent: Path, limit: int) -> Path:
        """Create a group below `parent` and enter it."""
        passes_on = parent / "cgroup.subtree_control"
        if self.version == 2 and "memory" not in passes_on.read_text().split():
            raise OSError("it does not pass the memory controller on (cgroup.subtree_control)")
        _remove_stale(parent)
        folder = parent / f"{_NAME}{os.getpid()}-{secrets.token_hex(4)}"
        folder.mkdir()
        try:
            _write(folder / self._names.limit, limit)
            with suppress(FileNotFoundError):
                _write(folder / self._names.swap, limit if self._names.swap_counts_memory else 0)
            _enter(folder)
        except OSError:
            folder.rmdir()
            raise
        return folder


def be_killed_first() -> None:
    """Have the kernel kill this process and its children before others when memory is short."""
    _adjustment().write_text("1000")


def _adjustment() -> Path:
    return Path("/proc/self/oom_score_adj")


def _enter(folder: Path) -> None:
    _write(folder / "cgroup.procs", 0)  # 0 is the process that writes


def _write(file: Path, number: int) -> None:
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.write(descriptor, b"%d" % number)
    finally:
        os.close(descriptor)


def own_group() -> tuple[int, Path, Path]:
    """Return the version with the memory controller, its mount point, and this process's folder in it."""
    groups = {version: path for version, path in _groups() if ".." not in path.parts}  # outside a namespace
    version = 1 if 1 in groups else 2
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        root, mounted = map(Path, left.split()[3:5])
        kind, _, options = right.split(maxsplit=2)
        fits = kind == _VERSIONS[version].kind and (version == 2 or "memory" in options.split(","))
        if fits and version in groups and groups[version].is_relative_to(root):
            return version, mounted, mounted / groups[version].relative_to(root)
    raise OSError("no control group file system with the memory controller is mounted")


def _groups() -> Iterator[tuple[int, Path]]:
    """Yield this process's group in each version. Version 1 counts only with the memory controller."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield 2, Path(path)
        elif "memory" in controllers.split(","):
            yield 1, Path(path)


def _remove_stale(parent: Path) -> None:
    """Remove groups of supervisors that were killed. The kernel refuses it while a process is in a group."""
    for folder in parent.glob(f"{_NAME}*-*"):
        process = folder.name.removeprefix(_NAME).partition("-")[0]
        if process == str(os.getpid()) or not Path("/proc", process).exists():
            with suppress(OSError):
                folder.rmdir()
