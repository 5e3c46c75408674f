"""Named points between two durable writes, at which tests end the process as a power cut would."""

from __future__ import annotations

import os
import signal

KILL_AT = "PERILUNE_KILL_AT"  # environment variable: the point at which to die

POINTS = (
    "submit.frozen",
    "submit.published",
    "submit.accepted",
    "admit.committed",
    "stage.intended",
    "stage.done",
    "stage.committed",
    "start.intended",
    "start.done",
    "adopt.committed",
    "finalize.begun",
    "finalize.pulled",
    "end.committed",
    "finalize.committed",
)
REMOTE_POINTS = ("clean.done",)  # further ones, of runs whose files lie elsewhere
REMOVAL_POINTS = ("remove.recorded", "remove.renamed")  # of `perilune gc` and `perilune rm`
MACHINE_POINTS = (  # further ones, of runs that have rented a machine
    "rent.committed",
    "create.intended",
    "create.done",
    "create.committed",
    "machine.ready",
    "machine.draining",
    "terminate.intended",
    "terminate.done",
    "gone.committed",
)


def reached(point: str) -> None:
    """Die here, at once and without a trace, if a test asked for it."""
    if os.environ.get(KILL_AT) == point:
        os.kill(os.getpid(), signal.SIGKILL)
