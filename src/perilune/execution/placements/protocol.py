"""The interface of a placement: seven repeatable operations on attempts.

An operation whose connection fails raises HostUnreachableError, and its effect is unknown; `observe` reports
that instead of raising. A placement declares its capabilities.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from perilune.errors import PeriluneError
from perilune.execution.observation import Observation


class StagingCancelledError(PeriluneError):
    """The run was cancelled before its upload was complete; no worker has been started."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a placement.

    Attributes:
        is_remote: whether an attempt's files are on another machine, from which they must be pulled and
            removed.
        look_interval_s: seconds between two observations of an attempt that can differ.
    """

    is_remote: bool
    look_interval_s: float


@dataclass(frozen=True, slots=True)
class Assignment:
    """One attempt, for a placement.

    Attributes:
        directory: its local directory: a copy of the bundle, with runtime/ and artifacts/.
        node: which of the attempt's machines is meant. Node 0 leads and has the evidence; of the others only
            runtime/ is collected, to a folder in the leader's runtime/.
    """

    run_id: str
    epoch: int
    directory: Path
    node: int = 0

    @property
    def home(self) -> Path:
        """The local directory for files from this machine."""
        return self.directory / "runtime" / f"node-{self.node}" if self.node else self.directory


@dataclass(frozen=True, slots=True)
class StagingRequest:
    """The contents of an attempt's working copy.

    Attributes:
        run_info: content of runtime/run.json for the worker, with "bundle_digest".
        previous: an ended attempt whose complete checkpoints and metrics are restored. If it was lost and
            still has files there, its processes are ended first.
        is_cancelled: asked from time to time during an upload, which ends when the answer is True.
    """

    bundle: Path
    run_info: Mapping[str, Any]
    previous: Assignment | None = None
    is_cancelled: Callable[[], bool] = lambda: False


class Placement(Protocol):
    """A place where attempts run.

    Attributes:
        name: for messages, such as "local" or "ssh:box"; recorded with every attempt.
        launcher: how a worker is started there.
    """

    name: str
    launcher: str
    capabilities: Capabilities

    def stage(self, attempt: Assignment, request: StagingRequest) -> str:
        """Create the attempt's working copy there, completely, verified, and from scratch.

        Must not be called once a worker may have been started there.

        Returns:
            The reason why the attempt cannot resume from the previous one's checkpoint; "" if it can, or if
            there is no checkpoint.

        Raises:
            RequestError: the bundle differs from what was frozen, or a disk is full.
            StagingCancelledError: `is_cancelled` returned True.
            HostUnreachableError: the connection failed.
            HostRefusedError: the machine is the wrong one or refuses access.
        """

    def start(self, attempt: Assignment) -> None:
        """Start a worker. Starting twice is harmless, because only one worker can claim the attempt.

        Raises:
            RequestError: a secret of the job is not set, or a newer attempt has started there.
            HostUnreachableError: it may have been started.
        """

    def is_starting(self, attempt: Assignment) -> bool:
        """Return whether a worker that this process started lives and has not claimed the attempt yet."""

    def observe(self, attempt: Assignment) -> Observation:
        """Observe the attempt. Reports a failed connection in the observation instead of raising.

        Small new files may be transferred along; `Observation.more` says whether a pull would bring more.
        """

    def pull(self, attempt: Assignment, *, whole: bool = False) -> None:
        """Transfer what is new: ends of logs, metrics, complete checkpoints.

        Args:
            whole: continue until everything is here. If there is a verdict, `artifacts/` then matches the
                manifest exactly, and runtime/result.json is written last.

        Raises:
            HostUnreachableError: transferred files are kept, and the next pull continues from there.
            WorkFailedError: with `whole`, if the files there differ from their manifest.
        """

    def stop(self, attempt: Assignment) -> bool:
        """End the attempt: ask, wait, then kill it and all its processes. No worker can start it afterwards.

        Returns:
            True if it is proven that none of its processes is left.

        Raises:
            HostUnreachableError: nothing is proven.
        """

    def remove(self, attempt: Assignment) -> None:
        """Delete the attempt's remote files. Call it only after the attempt was stopped and pulled whole.

        Raises:
            HostUnreachableError: the files may or may not be deleted.
        """
