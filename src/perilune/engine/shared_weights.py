"""Weights from another process: through shared memory, and checked before they are used."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from perilune.errors import RequestError, WorkFailedError

_MEMORY = Path("/dev/shm")  # noqa: S108 - files there are shared memory; elsewhere they are files


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Where the tensors of one policy version are. Small: it travels as JSON.

    Attributes:
        path: of safetensors bytes in shared memory.
        size: of them.
        digest: their SHA-256.
        version: of the policy.
    """

    path: str
    size: int
    digest: str
    version: int

    def read(self) -> dict[str, Tensor]:
        """The tensors, for `Engine.update_weights`. What is checked is the copy that is used.

        Raises:
            WorkFailedError: when they are gone, or are not what was announced.
        """
        try:
            content = Path(self.path).read_bytes()
        except OSError as error:
            raise WorkFailedError(f"the weights are gone: {error.strerror}", where=self.path) from None
        if len(content) != self.size or hashlib.sha256(content).hexdigest() != self.digest:
            raise WorkFailedError(
                f"the weights of version {self.version} are not those announced: their checksum differs",
                where=self.path,
                remedy="hold them until they were read",
            )
        try:
            return load(content)
        except SafetensorError as error:
            raise WorkFailedError(f"not safetensors: {error}", where=self.path) from None

    def to_json(self) -> dict[str, Any]:
        """For the message that announces them."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SharedWeights:
        """The inverse.

        Raises:
            RequestError: on anything else.
        """
        try:
            one = cls(**document)
        except TypeError as error:
            raise RequestError(f"not an announcement of weights: {error}") from None
        wanted = {"path": str, "size": int, "digest": str, "version": int}
        wrong = [key for key, kind in wanted.items() if not isinstance(getattr(one, key), kind)]
        if wrong:
            raise RequestError(f"{wrong[0]} is {document[wrong[0]]!r}", where="announcement of weights")
        return one


@contextmanager
def share_weights(state: Mapping[str, Tensor], version: int) -> Iterator[SharedWeights]:
    """Hold the tensors of policy `version` in shared memory, for other processes of this user to read."""
    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()})
    folder = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.NamedTemporaryFile(prefix="perilune-weights-", suffix=".safetensors", dir=folder) as file:
        file.write(content)
        file.flush()
        yield SharedWeights(file.name, len(content), hashlib.sha256(content).hexdigest(), version)
