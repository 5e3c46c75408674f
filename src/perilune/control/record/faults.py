"""Fault injection: named points between two durable writes where a test can kill the process."""

import os
import signal

KILL_AT = "PERILUNE_KILL_AT"  # environment variable: the point at which to kill the process


def kill_point(point: str) -> None:
    """Kill this process with SIGKILL if a test chose this point."""
    if os.environ.get(KILL_AT) == point:
        os.kill(os.getpid(), signal.SIGKILL)
