"""Watches one run: collects its output within bounds, and kills it when it exceeds its time or memory."""

import contextlib
import json
import os
import resource
import select
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from perilune.sandbox.control_group import ControlGroup
from perilune.sandbox.limits import SandboxLimits

_READ = 1 << 16
_CHECK_EVERY = 0.05  # seconds
_REPORT_ROOM = 1 << 20  # maximum size of a report without its files, bytes


class Watch:
    """Watches the processes that `launcher` starts.

    Args:
        launcher: leader of the process group of the launcher and the init process.
        scratch: the scratch folder if the kernel does not limit its size; else empty.
        group: the control group that limits memory, if there is one.
        owner: socket that the sandbox's owner closes when nobody waits for the result.
    """

    def __init__(
        self, limits: SandboxLimits, launcher: int, scratch: str, group: ControlGroup | None, owner: int
    ) -> None:
        self._limits, self._launcher, self._scratch, self._owner = limits, launcher, scratch, owner
        self._group, self._kills_before = group, group.count_kills() if group else 0
        self._output = Output(limits.output_bytes)
        self._report = bytearray()
        self._cause = ""

    def wait_for_end(self, output: int, report: int) -> dict[str, Any]:
        """Wait until all writers have closed the two pipes. Return cause, output, seconds and report."""
        began = time.monotonic()
        until, next_check = began + self._limits.seconds, began
        poll = select.poll()
        for descriptor in (output, report):
            poll.register(descriptor, select.POLLIN)
        poll.register(self._owner, 0)  # only reports that it was closed
        open_ends = {output, report}
        while open_ends:
            for descriptor, event in poll.poll(1000 * _CHECK_EVERY):
                if descriptor == self._owner:
                    self._end("nobody waits")  # no caller is left to see this cause
                    poll.unregister(descriptor)
                elif event and not self._read(descriptor, descriptor == output):
                    poll.unregister(descriptor)
                    open_ends.discard(descriptor)
            now = time.monotonic()
            if now >= until:
                self._end("timeout")
            elif now >= next_check:
                next_check = now + _CHECK_EVERY
                self._check_usage()
        if self._is_at_limit():
            self._end("memory")
        report_document = self._read_report()
        if not report_document:  # the init process is gone, but its children may still run
            self._kill()
        is_complete = not self._cause and os.WIFEXITED(report_document.get("status", signal.SIGKILL))
        return {
            "cause": self._cause,
            "output": self._output.text(is_complete=is_complete).hex(),
            "seconds": time.monotonic() - began,
            "report": report_document,
        }

    def _read(self, descriptor: int, is_output: bool) -> bool:
        data = os.read(descriptor, _READ)
        if is_output:
            self._output.add(data)
            if self._output.total > self._limits.flood_bytes:
                self._end("output")
        else:
            self._report += data
            if len(self._report) > 2 * self._limits.scratch_bytes + _REPORT_ROOM:
                self._end("report")
                self._report.clear()
        return bool(data)

    def _check_usage(self) -> None:
        """Kill the run if it exceeds a limit that the kernel does not enforce."""
        taken = unshared_memory(descendants(os.getpid()), _resident(os.getpid()))
        if self._is_at_limit() or taken > self._limits.memory_bytes:
            self._end("memory")
        if self._scratch and not _is_within_limits(self._scratch, self._limits):
            self._end("scratch")

    def _is_at_limit(self) -> bool:
        """Return whether the kernel killed a process because the whole run took too much memory."""
        return self._group is not None and self._group.count_kills() > self._kills_before

    def _end(self, cause: str) -> None:
        self._cause = self._cause or cause
        self._kill()

    def _kill(self) -> None:
        groups = [self._launcher]
        first, line, _ = self._report.partition(b"\n")
        if line and first.isdigit() and int(first) > 1:  # the code's process group, without a namespace
            groups.append(int(first))
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)

    def _read_report(self) -> dict[str, Any]:
        first, line, rest = self._report.partition(b"\n")
        try:
            document = json.loads(rest if line else first)
            return document if isinstance(document, dict) else {}
        except ValueError:
            return {}


class Output:
    """Keeps the beginning and the end of an output in bounded memory."""

    def __init__(self, most: int) -> None:
        self.total = 0
        self._half = most // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        if rest := data[max(room, 0) :]:
            self._tail.append(rest)
            self._tail_bytes += len(rest)
        while self._tail and self._tail_bytes - len(self._tail[0]) >= self._half:
            self._tail_bytes -= len(self._tail.popleft())

    @property
    def cut(self) -> int:
        """Bytes that are not kept."""
        return max(self.total - len(self._head) - self._half, 0)

    def text(self, *, is_complete: bool) -> bytes:
        """Return the kept output, with a line in place of a part that was cut.

        Args:
            is_complete: whether the run ended by itself. Otherwise the end of the output is random and is
                left out.
        """
        tail = b"".join(self._tail)[-self._half :]
        if not self.cut:
            return bytes(self._head) + tail
        if not is_complete:
            return bytes(self._head) + b"\n[... the rest was cut]\n"
        return bytes(self._head) + b"\n[... %d bytes were cut ...]\n" % self.cut + tail


def descendants(process: int) -> Iterator[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for thread in Path(f"/proc/{process}/task").iterdir():  # each thread has its own children
            with contextlib.suppress(OSError):
                children += map(int, (thread / "children").read_text().split())
    for child in children:
        yield child
        yield from descendants(child)


def unshared_memory(processes: Iterable[int], shared: int) -> int:
    """Return the memory of processes in bytes, beyond the `shared` bytes of their common parent.

    A page that several processes map counts once (its proportional size), and swapped pages count. If the
    kernel does not report the proportional size of a process, its resident size beyond `shared` counts.
    """
    proportional = alone = 0
    for process in processes:
        with contextlib.suppress(OSError):
            try:
                sizes = Path(f"/proc/{process}/smaps_rollup").read_text().split("\n")
                fields = dict(line.split(":", 1) for line in sizes[1:] if line)
                proportional += sum(int(fields[name].split()[0]) << 10 for name in ("Pss", "SwapPss"))
            except PermissionError:
                alone += max(_resident(process) - shared, 0)
    return max(proportional - shared, 0) + alone


def _resident(process: int) -> int:
    """Return the resident memory of a process in bytes."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()


def _is_within_limits(folder: str, limits: SandboxLimits) -> bool:
    total = count = 0
    for parent, folders, files in os.walk(folder):
        count += len(folders) + len(files)
        for name in files:
            with contextlib.suppress(OSError):
                total += Path(parent, name).lstat().st_size
        if total > limits.scratch_bytes or count > limits.scratch_files:
            return False
    return True
