"""Frozen policies: what is trained, written down as it was at a step, and put into a decoder of their own."""

from __future__ import annotations

from pathlib import Path

from perilune.engine.engine import Engine
from perilune.errors import REPORT_BUG, WorkFailedError
from perilune.learn import checkpoints
from perilune.learn.adaptation import trainable
from perilune.models.checkpoints.checksum import checksum
from perilune.models.decoder import Decoder


class Snapshots:
    """All that were frozen stay on disk; one at a time has the engine.

    Args:
        directory: among the stage's checkpoints, so that it is carried from attempt to attempt.
        engine: samples with `decoder`, which nobody else uses.
    """

    def __init__(self, directory: Path, decoder: Decoder, engine: Engine) -> None:
        self.engine, self.decoder = engine, decoder
        self._directory = directory
        self._seated: int | None = None

    def freeze(self, step: int, policy: Decoder) -> str:
        """Write down what is trained of `policy`, and return its checksum."""
        tensors = {name: one.detach() for name, one in trainable(policy).items()}
        checkpoints.write(self._path(step), {"weights": tensors}, {"step": step})
        self._seated = None if self._seated == step else self._seated
        return checksum(tensors)

    def seat(self, step: int, digest: str) -> Engine:
        """Let the engine sample as the policy did at that step, to the bit.

        Args:
            digest: what `freeze` returned, perhaps to an attempt before this one.

        Raises:
            RequestError: when the file is missing or damaged.
            WorkFailedError: when it is another policy than was frozen.
        """
        if self._seated == step:
            return self.engine
        tensors, _ = checkpoints.read(self._path(step), ("weights",))
        found = checksum(tensors["weights"])
        if found != digest:
            raise WorkFailedError(
                f"the policy frozen at step {step} has checksum {found}, and had {digest}",
                where=str(self._path(step)),
                remedy=REPORT_BUG,
            )
        checkpoints.copy_into(trainable(self.decoder), tensors["weights"], self._path(step))
        self.engine.update_weights(None, step)
        self._seated = step
        return self.engine

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:06d}"
