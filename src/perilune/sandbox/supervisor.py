"""The supervisor: a small process that forks a process tree for each run, watches it and ends it.

The supervisor starts with an empty environment, and its only descriptor is a socket to the sandbox's owner.
It reads only the length of a request. The run's own process reads the rest, so the next run inherits nothing
of it in memory. When the owner closes the socket, the run and the supervisor end.
"""

import contextlib
import json
import os
import platform
import resource
import sys
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from perilune.sandbox import kernel
from perilune.sandbox.control_group import ControlGroup
from perilune.sandbox.folders import remove_folder
from perilune.sandbox.isolation import MAX_DESCRIPTORS, Run, launch
from perilune.sandbox.landlock import landlock_version
from perilune.sandbox.limits import SandboxLimits, lower_limit
from perilune.sandbox.mechanisms import Mechanisms
from perilune.sandbox.seccomp import call_filter
from perilune.sandbox.watch import Watch
from perilune.sandbox.wire import HEADER, receive_exactly, send_frame

_OWNER = 0  # the socket
_TRIAL_REQUEST = {"code": "import csv, decimal", "files": {}}  # needs Python's library


def main() -> None:
    """Serve until the owner closes the socket."""
    opening = json.loads(sys.argv[2])
    group = None
    sys.path[:] = [str(Path(path).resolve()) for path in sys.path]
    try:
        limits = SandboxLimits(**opening["limits"])
        reasons = dict.fromkeys(opening["without"], "switched off")
        if "control_group" not in reasons:
            group = _enter_control_group(limits, reasons)
        supervisor = Supervisor(limits, opening["folder"], group, reasons)
        send_frame(_OWNER, supervisor.capabilities)
        while (size := receive_exactly(_OWNER, HEADER)) is not None:
            send_frame(_OWNER, supervisor.run(int(size, 16)))
    except BrokenPipeError:
        pass  # the owner has closed the socket
    except Exception:
        send_frame(_OWNER, {"failed": traceback.format_exc(limit=-3)})
    finally:
        if group:
            group.leave()
        remove_folder(opening["folder"])  # the owner may have been killed


def _enter_control_group(limits: SandboxLimits, reasons: dict[str, str]) -> ControlGroup | None:
    """Enter a new group; None if that fails, with the cause in `reasons`."""
    try:
        return ControlGroup(limits.memory_bytes, limits.scratch_bytes)
    except OSError as error:
        reasons["control_group"] = str(error)
        return None


class Supervisor:
    """Runs one request at a time.

    Args:
        folder: an empty folder for this sandbox alone.
        group: the control group that this process has entered, if any.
        reasons: for each mechanism not to use, why.

    Attributes:
        capabilities: the mechanisms that work on this machine, and why others do not.
    """

    def __init__(
        self, limits: SandboxLimits, folder: str, group: ControlGroup | None, reasons: dict[str, str]
    ) -> None:
        kernel.adopt_orphans()
        lower_limit(resource.RLIMIT_NOFILE, MAX_DESCRIPTORS)
        self._limits, self._folder, self._group = limits, folder, group
        self._taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        self._user = _own_user()
        self._mechanisms, reasons = self._test_mechanisms(reasons)
        self.capabilities = {"mechanisms": asdict(self._mechanisms), "reasons": reasons}

    def run(self, size: int, trial: Mechanisms | None = None) -> dict[str, Any]:
        """Run the request of `size` bytes that waits in the socket; with size 0, the trial program."""
        mechanisms = trial or self._mechanisms
        output, output_end = os.pipe()
        report, report_end = os.pipe()
        run = Run(mechanisms, self._limits, self._folder, self._user, self._taken, output_end, report_end)
        if not mechanisms.namespaces:
            self._make_scratch(run)
        launcher_id = os.fork()
        if launcher_id == 0:
            _begin(run, size)
        with contextlib.suppress(OSError):
            os.setpgid(launcher_id, launcher_id)
        os.close(output_end)
        os.close(report_end)
        scratch = "" if mechanisms.namespaces else run.scratch
        watch = Watch(self._limits, launcher_id, scratch, self._group, _OWNER)
        try:
            return watch.wait_for_end(output, report)
        finally:
            os.close(output)
            os.close(report)
            _reap_children()
            if not mechanisms.namespaces:
                remove_folder(run.scratch)

    def _make_scratch(self, run: Run) -> None:
        remove_folder(run.scratch)
        Path(run.scratch).mkdir(0o700)
        if run.mechanisms.own_user:
            os.chown(run.scratch, self._user, self._user)

    def _test_mechanisms(self, reasons: dict[str, str]) -> tuple[Mechanisms, dict[str, str]]:
        """Return the strongest combination of mechanisms that works, and the reasons why others do not."""
        without = frozenset(reasons)
        landlock = 0 if "landlock" in without else landlock_version()
        if not landlock:
            reasons.setdefault("landlock", "the kernel has no Landlock; it needs Linux 5.13 and lsm=landlock")
        seccomp = "seccomp" not in without and _can_filter()
        if not seccomp:
            reasons.setdefault("seccomp", f"no filter for {platform.machine()}, or the kernel refused it")
        control_group = self._group.version if self._group else 0
        least = Mechanisms(False, False, False, False, landlock, seccomp, control_group)
        for tried in _candidates(least):
            if without & tried.names:
                continue
            report = self.run(0, tried)["report"]
            if report.get("status") == 0:
                return tried, {name: why for name, why in reasons.items() if name not in tried.names}
            for name in sorted(tried.names - least.names):
                reasons.setdefault(name, report.get("failed", "Python's own library cannot be read"))
        raise OSError(f"nothing can be run on this machine: {reasons}")


def _begin(run: Run, size: int) -> None:
    try:
        request = _TRIAL_REQUEST if not size else json.loads(receive_exactly(_OWNER, size) or b"{}")
        launch(run, request)
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
    """Return a user id of this namespace that is probably unused."""
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
            kernel.drop_privileges()
            kernel.filter_calls(program)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _reap_children() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0)[0]:
            pass
