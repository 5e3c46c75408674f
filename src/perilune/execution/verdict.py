"""The verdict in runtime/result.json: how an attempt ended."""

import contextlib
import errno
import signal
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from perilune.errors import PeriluneError, ProcessLostError, RequestError, WorkFailedError
from perilune.files import read_json
from perilune.sandbox.control_group import own_group
from perilune.sandbox.kernel import signal_name
from perilune.watchdog import STACKS_FILE, read_stall

FAILURE_FILE = "failure.json"  # in runtime/: the task process's own report of its failure
RESERVE_FILE = ".reserve"  # in runtime/: space for failure report and verdict on a full disk
OUTSIDE_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class Cause(StrEnum):
    """The reason why an attempt did not succeed."""

    NONE = ""
    REQUEST = "request_error"  # the task reported an error in the request
    WORK = "work_failed"  # the task reported why it could not continue
    CRASHED = "crashed"  # an unexpected exception
    STALLED = "stalled"  # no progress for too long, so the watchdog ended it
    EXITED = "user_exit"  # the process exited with a code of its own
    SIGNALLED = "signalled"  # SIGSEGV, SIGABRT and the like
    PROCESS_LOST = "process_lost"  # one of several processes ended without a report
    KILLED = "killed"  # SIGKILL or SIGTERM from outside
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    STOPPED = "stopped"  # the worker was asked to stop
    BUNDLE_REJECTED = "bundle_rejected"  # the bundle differs from what was frozen
    TRANSFER_FAILED = "transfer_failed"  # uploaded files arrived damaged
    TIMED_OUT = "timeout"  # the attempt reached the time limit of its template
    HOST_REFUSED = "host_refused"  # the machine is the wrong one or refuses access
    ARTIFACT_MISSING = "artifact_missing"
    ARTIFACT_INVALID = "artifact_invalid"
    START_FAILED = "start_failed"  # the worker did not start
    RUNNER_DIED = "runner_died"  # the worker died without a result, or its files are gone
    UNREACHABLE = "unreachable"  # for longer than the retry policy allows
    NO_MACHINE = "no_machine"  # none could be rented in time
    PREEMPTED = "preempted"  # its machine was preempted
    MACHINE_LOST = "machine_lost"  # its machine is gone for an unknown reason
    LEASE_ENDED = "lease_ended"  # its machine reached the limit on lifetime or cost


@dataclass(frozen=True, slots=True)
class Verdict:
    """The content of runtime/result.json.

    Attributes:
        exit_code: of the task process; None if a signal ended it or it never started.
        cause: "" on success.
        manifest_digest: SHA-256 of artifacts/manifest.json; None if it could not be written.
        seconds: from claim to verdict.
    """

    epoch: int
    exit_code: int | None
    signal: int | None
    cause: str
    message: str
    manifest_digest: str | None
    seconds: float

    @property
    def succeeded(self) -> bool:
        """True if the task succeeded and its evidence is complete."""
        return self.cause == Cause.NONE and self.exit_code == 0 and self.manifest_digest is not None


def read_verdict(runtime: Path, epoch: int) -> Verdict | None:
    """Return the verdict on attempt `epoch`; None if there is none, or only one on another attempt.

    Raises:
        RequestError: result.json is damaged.
    """
    path = runtime / "result.json"
    if not path.exists():
        return None
    fields: dict[str, Any] = read_json(path)
    try:
        return parse_verdict(fields) if fields["epoch"] == epoch else None
    except (KeyError, TypeError, ValueError):
        raise RequestError("not the result of an attempt", where=str(path)) from None


def parse_verdict(fields: Mapping[str, Any]) -> Verdict:
    """Return the verdict with these fields, whose types are checked.

    Raises:
        KeyError, TypeError, ValueError: the fields are not those of a verdict.
    """
    Cause(fields["cause"])
    return TypeAdapter(Verdict).validate_python(dict(fields))


def make_damaged_verdict(epoch: int, why: str) -> Verdict:
    """Return the verdict on an attempt whose worker has ended and left a verdict that cannot be read."""
    return Verdict(epoch, None, None, Cause.ARTIFACT_INVALID, why, None, 0.0)


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of the task process, according to its exit status and its failure report."""

    exit_code: int | None
    signal: int | None
    cause: Cause
    message: str


def find_ending(status: int, failure: Path, *, stopped: bool, memory_kill: bool) -> Ending:
    """Determine how a task process ended.

    Args:
        status: as `Popen.returncode`: the exit code, or minus the number of the signal.
        failure: the task process's failure report, if it could write one.
        stopped: whether the worker asked it to stop.
        memory_kill: whether the kernel killed a process for lack of memory meanwhile.
    """
    if status == 0:
        return Ending(0, None, Cause.NONE, "")
    number = -status if status < 0 else None
    code = status if status > 0 else None
    if stopped:
        return Ending(code, number, Cause.STOPPED, "stopped on request")
    if number is not None:
        return Ending(None, number, *_find_signal_ending(number, memory_kill))
    if failure.exists():
        with contextlib.suppress(RequestError, OSError, KeyError, TypeError, ValueError):  # a damaged report
            report = read_json(failure)
            return Ending(code, None, Cause(report["cause"]), str(report["message"]))
    if stall := read_stall(failure.parent):
        message = f"{stall}; the stacks of all threads are in {failure.parent.name}/{STACKS_FILE}"
        return Ending(code, None, Cause.STALLED, message)
    return Ending(code, None, Cause.EXITED, f"the task exited with code {code}")


def _find_signal_ending(number: int, memory_kill: bool) -> tuple[Cause, str]:
    if number == signal.SIGKILL and memory_kill:
        return Cause.OUT_OF_MEMORY, "the kernel killed the process for lack of memory"
    if number in OUTSIDE_SIGNALS:
        return Cause.KILLED, f"killed from outside with {signal_name(number)}"
    return Cause.SIGNALLED, f"killed by {signal_name(number)}"


def find_cause(error: BaseException) -> Cause:
    """Return the cause that describes an exception; an OSError in its chain may reveal a full disk."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError) and chain.errno in {errno.ENOSPC, errno.EDQUOT}:
            return Cause.DISK_FULL
        chain = chain.__cause__
    if _is_out_of_memory(error):
        return Cause.OUT_OF_MEMORY
    if isinstance(error, RequestError):
        return Cause.REQUEST
    if isinstance(error, ProcessLostError):
        return Cause.PROCESS_LOST
    return Cause.WORK if isinstance(error, WorkFailedError) else Cause.CRASHED


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python or torch, which is not imported here, could not allocate memory."""
    if isinstance(error, RuntimeError):
        return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    return isinstance(error, MemoryError)


def describe_error(error: Exception) -> str:
    """Return the message of an error; for an unexpected one also its type and the line that raised it."""
    if isinstance(error, PeriluneError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = "the disk is full" if find_cause(error) is Cause.DISK_FULL else f"{type(error).__name__}: {error}"
    return text + location


_OWN_EVENTS = {1: "memory.oom_control", 2: "memory.events.local"}  # by version of control groups


def count_memory_kills() -> int:
    """Return how many processes of this process's control group the kernel has killed for lack of memory.

    Does not count other groups (other jobs, containers, sandboxed runs), because they have limits of their
    own. Counts the whole machine if the group is unknown; 0 if neither count is available.
    """
    try:
        version, _, folder = own_group()
        lines = (folder / _OWN_EVENTS[version]).read_text().splitlines()
    except OSError:
        try:
            lines = Path("/proc/vmstat").read_text().splitlines()
        except OSError:
            return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
