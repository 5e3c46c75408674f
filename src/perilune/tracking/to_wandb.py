"""Weights & Biases: offline, for `wandb sync` to send, unless WANDB_MODE says online."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")  # seconds for a server to answer

import wandb

from perilune.errors import WorkFailedError
from perilune.tracking.sinks import Sink, TrackedRun
from perilune.tracking.trail import Figures


class WandB:
    """One run in the project of its experiment.

    The key is wandb's own affair: it reads WANDB_API_KEY when it is online, and offline needs none. Neither
    our code nor the machine, its user or its environment are told to it.
    """

    def __init__(self, directory: Path, run: TrackedRun) -> None:
        mode = os.environ.get("WANDB_MODE", "offline")
        identity = run.id.lower()
        if mode == "offline":
            for before in (directory / "wandb").glob(f"offline-run-*-{identity}"):
                shutil.rmtree(before)
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, save_code=False,
            x_disable_stats=True, x_disable_meta=True,
            x_disable_machine_info=True,
        )  # fmt: skip
        try:
            self._run = wandb.init(
                mode=mode,  # type: ignore[arg-type]
                dir=directory, project=run.experiment, name=run.stage, id=identity,
                resume=None if mode == "offline" else "allow", config=dict(run.config), settings=settings,
            )  # fmt: skip
        except wandb.Error as error:
            raise WorkFailedError(f"wandb: {error}") from None
        self.after = self._run.step - 1
        self.place = f"wandb sync {self._run.settings.sync_dir}" if mode == "offline" else str(self._run.url)

    def write(self, figures: Figures) -> None:
        """Take one step."""
        self._run.log(dict(figures.values), step=figures.step)

    def close(self, *, failed: bool = False) -> None:
        """Write the file out, or wait until the server has everything."""
        self._run.finish(exit_code=int(failed))


def open_run(directory: Path, run: TrackedRun) -> Sink:
    """Begin the run's offline folder anew, or go on with the run that the server has."""
    return WandB(directory, run)
