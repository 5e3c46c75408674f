"""A command that dies of SIGKILL at every named point in turn, and is given again after each."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from perilune.control.record import faults


def killed_at_every_point(
    command: Callable[[], object],
    notes: Path,
    after: Callable[[str], object] = lambda point: None,
) -> list[str]:
    """Give the command, in a process of its own each time, until it ends by itself.

    Args:
        notes: file in which a process leaves the point at which it dies.
        after: is called when one has died, with that point.

    Returns:
        The points in the order in which somebody died there.
    """
    notes.touch()

    def reached(point: str) -> None:
        if point in notes.read_text().split():
            return
        with notes.open("a") as file:
            file.write(f"{point}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def live() -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith("perilune.control.") and module is not faults and hasattr(module, "reached"):
                module.reached = reached  # type: ignore[attr-defined]
        command()

    for _ in range(100):
        process = multiprocessing.get_context("fork").Process(target=live)
        process.start()
        process.join(120.0)
        points = notes.read_text().split()
        if process.exitcode != -signal.SIGKILL:
            assert process.exitcode == 0, f"after {points}: {process.exitcode}"
            return points
        after(points[-1])
    raise AssertionError("it never ends")
