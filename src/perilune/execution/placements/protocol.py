"""What the control plane asks of a place where attempts run: seven verbs, each of which may be repeated.

A verb whose way to the place is cut raises HostUnreachableError, and nothing is known then; `observe` never
raises it, but says so. What a place can do is declared, so that nobody has to guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from perilune.execution.observation import Observation


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a placement declares of itself.

    Attributes:
        elsewhere: whether an attempt's files lie on another machine until they are pulled, and have to be
            removed there in the end.
        look_every: seconds between two looks at an attempt; more often tells nothing new.
    """

    elsewhere: bool
    look_every: float


@dataclass(frozen=True, slots=True)
class Assignment:
    """One attempt, as a placement is told of it.

    Attributes:
        run_id: whose attempt it is.
        epoch: its number.
        directory: where its evidence comes to lie on this machine: a copy of the bundle, with runtime/ and
            artifacts/.
        node: which of the attempt's machines is meant, where it has several. The first one leads: it has the
            evidence; of the others only runtime/ comes home, to a folder of their own in its runtime/.
    """

    run_id: str
    epoch: int
    directory: Path
    node: int = 0

    @property
    def home(self) -> Path:
        """Where what comes from its machine comes to lie."""
        return self.directory / "runtime" / f"node-{self.node}" if self.node else self.directory


class Placement(Protocol):
    """A place where attempts run.

    Attributes:
        name: what people call it, as "local" or "ssh:box"; recorded with every attempt.
        launcher: how a worker is started there.
    """

    name: str
    launcher: str
    capabilities: Capabilities

    def stage(
        self, attempt: Assignment, bundle: Path, order: Mapping[str, Any], previous: Path | None
    ) -> None:
        """Make the attempt's working copy there, whole or not at all, and verified; redone from nothing.

        Must not be called once a worker may have been started there.

        Args:
            bundle: the frozen bundle.
            order: what runtime/run.json tells the worker, with "bundle_digest".
            previous: directory of an attempt whose complete checkpoints and figures are carried on.

        Raises:
            RequestError: when the bundle is not what was frozen, or a disk is full.
            HostUnreachableError: when the way is cut.
            HostRefusedError: when it is the wrong machine or lets nobody in.
        """
        ...

    def start(self, attempt: Assignment) -> None:
        """Start a worker. Starting twice is harmless: only one can claim the attempt.

        Raises:
            RequestError: when a secret that the job names is not set, or a newer attempt has begun there.
            HostUnreachableError: it may have been started.
        """
        ...

    def starting(self, attempt: Assignment) -> bool:
        """Whether a worker that this process started there lives and has not claimed the attempt yet."""
        ...

    def observe(self, attempt: Assignment) -> Observation:
        """Look at it. Never raises for want of a way there: the observation says so, and nothing else.

        What is new and small may come home along with it; `Observation.more` says whether a pull brings more.
        """
        ...

    def pull(self, attempt: Assignment, *, whole: bool = False) -> None:
        """Bring home what is new: the ends of logs, figures, complete checkpoints.

        Args:
            whole: go on until all of it is here. Where there is a verdict, `artifacts/` is afterwards
                exactly what the manifest says, and runtime/result.json comes last.

        Raises:
            HostUnreachableError: what has come so far is kept, and the next pull goes on from there.
            WorkFailedError: with `whole`, when what lies there is not what its manifest says.
        """
        ...

    def stop(self, attempt: Assignment) -> bool:
        """End the attempt: ask, wait, then kill it and all it started. None can begin it afterwards.

        Returns:
            True when it is proven that none of its processes is left.

        Raises:
            HostUnreachableError: nothing is proven.
        """
        ...

    def remove(self, attempt: Assignment) -> None:
        """Delete what the attempt holds there and not here. Only after it was stopped and pulled whole.

        Raises:
            HostUnreachableError: it may or may not be gone.
        """
        ...
