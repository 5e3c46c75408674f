"""How much of an attempt was sent to its machine, shown while the control plane is busy sending it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from perilune.execution.placements.upload import read_sent

if TYPE_CHECKING:
    from perilune.cli.console import StageProgress
    from perilune.control.record.home import Home

SHOW_EVERY = 0.5  # seconds


@contextmanager
def sending_shown(home: Home, view: StageProgress) -> Iterator[Callable[[str, str], None]]:
    """Show in `view` what is sent for the latest stage that was told of.

    Yields:
        What to tell of a stage that begins: its name, and its run.
    """
    told: list[tuple[str, str]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(SHOW_EVERY):
            for stage, run_id in told[-1:]:
                sent = read_sent(home.attempt(run_id, home.newest_attempt(run_id)))
                if sent is not None:
                    view.progressed(stage, sent["done"], sent["total"], sent["unit"], sent["figures"])

    watcher = threading.Thread(target=watch, name="sending", daemon=True)
    watcher.start()
    try:
        yield lambda stage, run_id: told.append((stage, run_id))
    finally:
        over.set()
        watcher.join()
