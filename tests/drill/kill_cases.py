"""Run a command repeatedly and kill it with SIGKILL at one further named point each time."""

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
    """Run the command, each time in a new process, until it ends by itself.

    Args:
        notes: file in which a process records the point at which it dies.
        after: called with the point after each kill.

    Returns:
        The points in the order of the kills.
    """
    notes.touch()

    def kill_point(point: str) -> None:
        if point in notes.read_text().split():
            return
        with notes.open("a") as file:
            file.write(f"{point}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def live() -> None:
        for name, module in list(sys.modules.items()):
            if (
                name.startswith("perilune.control.")
                and module is not faults
                and hasattr(module, "kill_point")
            ):
                module.kill_point = kill_point  # type: ignore[attr-defined]
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
    raise AssertionError("the command did not end after 100 kills")
