"""Weights & Biases: offline for a later `wandb sync`, unless WANDB_MODE is online."""

import os
import shutil
from pathlib import Path

os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")  # seconds for a server to answer

import wandb

from perilune.errors import WorkFailedError
from perilune.tracking.sinks import TrackedRun
from perilune.tracking.trail import Figures


class Tracker:
    """One run in the project of its experiment: a new folder if offline, otherwise continued on the server.

    Online, wandb reads the key from WANDB_API_KEY itself; offline it needs none. Perilune sends neither code
    nor data about the machine, its user or its environment.
    """

    def __init__(self, directory: Path, run: TrackedRun) -> None:
        mode = os.environ.get("WANDB_MODE", "offline")
        identity = run.id.lower()
        if mode == "offline":
            for before in (directory / "wandb").glob(f"offline-run-*-{identity}"):
                shutil.rmtree(before)
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
        )
        try:
            self._run = wandb.init(
                mode=mode,  # type: ignore[arg-type]
                dir=directory,
                project=run.experiment,
                name=run.stage,
                id=identity,
                resume=None if mode == "offline" else "allow",
                config=dict(run.config),
                settings=settings,
            )
        except wandb.Error as error:
            remedy = "check WANDB_API_KEY and WANDB_BASE_URL, or set WANDB_MODE=offline"
            raise WorkFailedError(f"wandb did not open the run: {error}", remedy=remedy) from None
        self.after = self._run.step - 1
        self.place = f"wandb sync {self._run.settings.sync_dir}" if mode == "offline" else str(self._run.url)

    def write(self, figures: Figures) -> None:
        self._run.log(dict(figures.values), step=figures.step)

    def close(self, *, failed: bool = False) -> None:
        """Close the file, or wait until the server has all figures."""
        self._run.finish(exit_code=int(failed))
