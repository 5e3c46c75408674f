"""Snapshots of the policy at earlier steps, loaded into a separate decoder to play against."""

from pathlib import Path

from perilune.engine.engine import Engine
from perilune.errors import REPORT_BUG, WorkFailedError
from perilune.learn import checkpoints
from perilune.learn.adaptation import trainable
from perilune.models.checkpoints.checksum import checksum
from perilune.models.decoder import Decoder


class Snapshots:
    """Keeps all snapshots on disk, and one at a time in the engine.

    Args:
        directory: a folder among the stage's checkpoints, which the next attempt receives.
        engine: samples with `decoder`, which nothing else uses.
    """

    def __init__(self, directory: Path, decoder: Decoder, engine: Engine) -> None:
        self.engine, self.decoder = engine, decoder
        self._directory = directory
        self._loaded: int | None = None

    def save(self, step: int, policy: Decoder) -> str:
        """Write the trained parameters of `policy`, and return their checksum."""
        tensors = {name: parameter.detach() for name, parameter in trainable(policy).items()}
        checkpoints.write(self._path(step), {"weights": tensors}, {"step": step})
        self._loaded = None if self._loaded == step else self._loaded
        return checksum(tensors)

    def load(self, step: int, digest: str) -> Engine:
        """Make the engine sample with the policy of that step, bit for bit.

        Args:
            digest: the checksum that `save` returned, possibly in an earlier attempt.

        Raises:
            RequestError: when the snapshot is missing or damaged.
            WorkFailedError: when the snapshot has another checksum.
        """
        if self._loaded != step:
            self.copy(step, digest, self.decoder)
            self.engine.update_weights(None, step)
            self._loaded = step
        return self.engine

    def copy(self, step: int, digest: str, decoder: Decoder) -> None:
        """Copy the policy of that step into `decoder`, bit for bit.

        Raises:
            RequestError, WorkFailedError: see `load`.
        """
        tensors, _ = checkpoints.read(self._path(step), ("weights",))
        actual = checksum(tensors["weights"])
        if actual != digest:
            raise WorkFailedError(
                f"the snapshot of step {step} has checksum {actual}, and was saved with {digest}",
                where=str(self._path(step)),
                remedy=REPORT_BUG,
            )
        checkpoints.copy_into(trainable(decoder), tensors["weights"], self._path(step))

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:06d}"
