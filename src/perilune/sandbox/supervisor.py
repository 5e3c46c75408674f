"""The keeper: a small process that holds nothing, forks a cell for each run, watches it and ends it.

It is started with an empty environment and no descriptor but a socket to the sandbox's owner. Of a request
it reads the length alone: what is to be run is read by the cell's own process, so that no run leaves anything
behind in the memory that the next one begins with. When the owner goes away, so do the run and the keeper.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shutil
import sys
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from perilune.sandbox import kernel
from perilune.sandbox.isolation import MOST_DESCRIPTORS, Cell, porter
from perilune.sandbox.landlock import landlock_version
from perilune.sandbox.limits import SandboxLimits, lower
from perilune.sandbox.mechanisms import Mechanisms
from perilune.sandbox.seccomp import call_filter
from perilune.sandbox.watch import Watch
from perilune.sandbox.wire import HEADER, receive_exactly, send_frame

_OWNER = 0  # the socket
_TRIAL = {"code": "import csv, decimal", "files": {}}  # needs Python's library


def main() -> None:
    """Serve until the owner goes away."""
    opening = json.loads(sys.argv[2])
    sys.path[:] = [str(Path(place).resolve()) for place in sys.path]
    try:
        keeper = Keeper(SandboxLimits(**opening["limits"]), opening["folder"], frozenset(opening["without"]))
        send_frame(_OWNER, keeper.found)
        while (size := receive_exactly(_OWNER, HEADER)) is not None:
            send_frame(_OWNER, keeper.run(int(size, 16)))
    except BrokenPipeError:
        pass  # the owner went away
    except Exception:
        send_frame(_OWNER, {"failed": traceback.format_exc(limit=-3)})
    finally:
        shutil.rmtree(opening["folder"], ignore_errors=True)  # an owner that was killed cannot


class Keeper:
    """Runs one request after the other.

    Attributes:
        found: the mechanisms that were found to work here, and why others do not.
    """

    def __init__(self, limits: SandboxLimits, folder: str, without: frozenset[str]) -> None:
        kernel.adopt_orphans()
        lower(resource.RLIMIT_NOFILE, MOST_DESCRIPTORS)
        self._limits, self._folder = limits, folder
        self._taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        self._user = _own_user()
        self._mechanisms, reasons = self._what_works(without)
        self.found = {"mechanisms": asdict(self._mechanisms), "reasons": reasons}

    def run(self, size: int, trial: Mechanisms | None = None) -> dict[str, Any]:
        """Run the request that stands in the socket, of so many bytes; of none, the trial."""
        mechanisms = trial or self._mechanisms
        output, output_end = os.pipe()
        report, report_end = os.pipe()
        cell = Cell(mechanisms, self._limits, self._folder, self._user, self._taken, output_end, report_end)
        if not mechanisms.namespaces:
            self._make_scratch(cell)
        porter_id = os.fork()
        if porter_id == 0:
            _begin(cell, size)
        with contextlib.suppress(OSError):
            os.setpgid(porter_id, porter_id)
        os.close(output_end)
        os.close(report_end)
        watch = Watch(self._limits, porter_id, cell.scratch if not mechanisms.namespaces else "", _OWNER)
        try:
            return watch.until_the_end(output, report)
        finally:
            os.close(output)
            os.close(report)
            _bury_all()
            if not mechanisms.namespaces:
                shutil.rmtree(cell.scratch, ignore_errors=True)

    def _make_scratch(self, cell: Cell) -> None:
        shutil.rmtree(cell.scratch, ignore_errors=True)
        Path(cell.scratch).mkdir(0o700)
        if cell.mechanisms.own_user:
            os.chown(cell.scratch, self._user, self._user)

    def _what_works(self, without: frozenset[str]) -> tuple[Mechanisms, dict[str, str]]:
        """The most that can be had, found by trying, and for what cannot be had the reason."""
        reasons = dict.fromkeys(without, "switched off")
        landlock = 0 if "landlock" in without else landlock_version()
        if not landlock:
            reasons.setdefault("landlock", "the kernel has no Landlock: Linux 5.13 or later, lsm=landlock")
        seccomp = "seccomp" not in without and _can_filter()
        if not seccomp:
            reasons.setdefault("seccomp", f"no filter for {platform.machine()}, or the kernel refuses it")
        least = Mechanisms(False, False, False, False, landlock, seccomp)
        for tried in _candidates(least):
            if without & tried.names:
                continue
            report = self.run(0, tried)["report"]
            if report.get("status") == 0:
                return tried, {name: why for name, why in reasons.items() if name not in tried.names}
            for name in sorted(tried.names - least.names):
                reasons.setdefault(name, report.get("failed", "Python's own library cannot be read there"))
        raise OSError(f"nothing can be run here: {reasons}")


def _begin(cell: Cell, size: int) -> None:
    try:
        request = _TRIAL if not size else json.loads(receive_exactly(_OWNER, size) or b"{}")
        porter(cell, request)
    finally:
        os._exit(1)


def _candidates(least: Mechanisms) -> list[Mechanisms]:
    if os.geteuid():
        return [replace(least, namespaces=True, own_users=True, counted=True), least]
    return [
        replace(least, namespaces=True, own_user=True, counted=True),
        replace(least, namespaces=True, own_users=True),
        replace(least, own_user=True, counted=True),
        least,
    ]


def _own_user() -> int:
    """A user whom probably nobody else is, among those that exist here."""
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    highest = min(max(first + count for first, _, count in ranges), 1 << 31) - 2
    return highest - os.getpid() % max(highest // 2, 1)


def _can_filter() -> bool:
    program = call_filter(among_others=True, no_processes=True)
    if not program:
        return False
    child = os.fork()
    if child == 0:
        try:
            kernel.give_up_privileges()
            kernel.filter_calls(program)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _bury_all() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0)[0]:
            pass
