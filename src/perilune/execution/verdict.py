"""How an attempt ended, exactly: the verdict of runtime/result.json."""

from __future__ import annotations

import errno
import signal
import traceback
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from perilune.errors import PeriluneError, ProcessLostError, RequestError, WorkFailedError
from perilune.files import read_json
from perilune.watchdog import STACKS, stall_in

LAST_WORDS = "failure.json"  # in runtime/: why the task process gave up, in its own words
RESERVE = ".reserve"  # in runtime/: room kept for last words and verdict on a disk that the task fills
OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class Cause(StrEnum):
    """Why an attempt did not succeed."""

    NONE = ""
    REQUEST = "request_error"  # the task found the request wrong
    WORK = "work_failed"  # the task said why it could not go on
    CRASHED = "crashed"  # an exception nobody expected
    STALLED = "stalled"  # nothing happened for too long, and the watchdog ended it
    EXITED = "user_exit"  # the process left with a code of its own
    SIGNALLED = "signalled"  # SIGSEGV, SIGABRT and their like
    PROCESS_LOST = "process_lost"  # one of several ended and left no word why
    KILLED = "killed"  # SIGKILL or SIGTERM from outside
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    STOPPED = "stopped"  # the worker was asked to stop
    BUNDLE_REJECTED = "bundle_rejected"  # it is not what was frozen
    TRANSFER_FAILED = "transfer_failed"  # what arrived on the machine is not what was sent
    TIMED_OUT = "timeout"  # it took longer than its template lets it
    HOST_REFUSED = "host_refused"  # the machine is the wrong one, or lets nobody in
    ARTIFACT_MISSING = "artifact_missing"
    ARTIFACT_INVALID = "artifact_invalid"
    START_FAILED = "start_failed"  # no worker came to life
    RUNNER_DIED = "runner_died"  # the worker is dead and left no result
    UNREACHABLE = "unreachable"  # not heard of for longer than the policy waits
    NO_MACHINE = "no_machine"  # none could be rented in time
    PREEMPTED = "preempted"  # its machine was taken away
    MACHINE_LOST = "machine_lost"  # its machine is gone, and nobody says why
    LEASE_ENDED = "lease_ended"  # its machine had existed, or cost, as much as it might


@dataclass(frozen=True, slots=True)
class Verdict:
    """What runtime/result.json says.

    Attributes:
        epoch: number of the attempt.
        exit_code: of the task process; None when a signal ended it or it never began.
        signal: number of that signal, or None.
        cause: "" on success.
        message: one line for the user.
        manifest_digest: SHA-256 of artifacts/manifest.json; None when it could not be written.
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
        """Whether the work was done and its evidence is whole."""
        return self.cause == Cause.NONE and self.exit_code == 0 and self.manifest_digest is not None

    def document(self) -> dict[str, Any]:
        """The fields of result.json."""
        return asdict(self)


def read_verdict(runtime: Path, epoch: int) -> Verdict | None:
    """The verdict on attempt `epoch`; None when there is none, or only one of another attempt.

    Raises:
        RequestError: when result.json is damaged.
    """
    path = runtime / "result.json"
    if not path.exists():
        return None
    fields: dict[str, Any] = read_json(path)
    if fields.get("epoch") != epoch:
        return None
    return Verdict(**{name: fields.get(name) for name in Verdict.__slots__})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Ending:
    """How the task process ended: as much as its exit status and its own last words tell."""

    exit_code: int | None
    signal: int | None
    cause: Cause
    message: str


def ending_of(status: int, last_words: Path, *, stopped: bool, memory_kill: bool) -> Ending:
    """Judge a task process.

    Args:
        status: as `Popen.returncode`: the exit code, or minus the signal's number.
        last_words: file in which the task process says why it gave up, if it could.
        stopped: whether we asked it to stop.
        memory_kill: whether the kernel killed something for memory meanwhile.
    """
    if status == 0:
        return Ending(0, None, Cause.NONE, "")
    number = -status if status < 0 else None
    code = status if status > 0 else None
    if stopped:
        return Ending(code, number, Cause.STOPPED, "stopped on request")
    if number is not None:
        return Ending(None, number, *_of_signal(signal.Signals(number), memory_kill))
    if last_words.exists():
        said = read_json(last_words)
        return Ending(code, None, Cause(said["cause"]), str(said["message"]))
    if stall := stall_in(last_words.parent):
        message = f"{stall}; the stacks of all threads are in {last_words.parent.name}/{STACKS}"
        return Ending(code, None, Cause.STALLED, message)
    return Ending(code, None, Cause.EXITED, f"the task left with exit code {code}")


def _of_signal(number: signal.Signals, memory_kill: bool) -> tuple[Cause, str]:
    if number == signal.SIGKILL and memory_kill:
        return Cause.OUT_OF_MEMORY, "the kernel ended it for want of memory"
    if number in OUTSIDE:
        return Cause.KILLED, f"ended from outside by {number.name}"
    return Cause.SIGNALLED, f"ended by {number.name}"


def cause_of(error: BaseException) -> Cause:
    """What kind of failure an exception out of a task is."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError) and chain.errno in {errno.ENOSPC, errno.EDQUOT}:
            return Cause.DISK_FULL
        chain = chain.__cause__
    if isinstance(error, MemoryError):
        return Cause.OUT_OF_MEMORY
    if isinstance(error, RequestError):
        return Cause.REQUEST
    if isinstance(error, ProcessLostError):
        return Cause.PROCESS_LOST
    return Cause.WORK if isinstance(error, WorkFailedError) else Cause.CRASHED


def describe_error(error: Exception) -> str:
    """The message of an error; for an unexpected one also its type and the line that raised it."""
    if isinstance(error, PeriluneError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def memory_kills() -> int:
    """Number of processes that the kernel has killed for lack of memory since boot; 0 if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
