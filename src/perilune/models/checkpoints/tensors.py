"""The tensors in the weight files of a folder: reading their headers, and reading the tensors one by one."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from perilune.errors import RequestError
from perilune.models.checkpoints.folder import CheckpointFolder, pickle_error

_MAX_MAPPED_BYTES = 1 << 26  # read bytes after which a file is reopened


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, as its header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self, opened: Any) -> Tensor:
        """Read the tensor from its open file.

        Raises:
            RequestError: when the tensor no longer has the shape of the header.
        """
        tensor: Tensor = opened.get_tensor(self.name)
        if tuple(tensor.shape) != self.shape:
            raise RequestError(
                f"tensor {self.name} changed while it was being read",
                where=str(self.file),
                remedy="load the checkpoint again when no other program writes it",
            )
        return tensor


def read_tensor_headers(folder: CheckpointFolder) -> dict[str, StoredTensor]:
    """Return the tensors in the weight files, by name. Reads only the headers.

    Raises:
        RequestError: when a file is missing, malformed or a pickle, or a tensor is in two files.
    """
    stored: dict[str, StoredTensor] = {}
    for tensor in (tensor for file in folder.weight_files() for tensor in _read_headers(file)):
        if tensor.name in stored:
            raise RequestError(
                f"tensor {tensor.name} is also in {stored[tensor.name].file.name}",
                where=str(tensor.file),
                remedy="fetch the folder again",
            )
        stored[tensor.name] = tensor
    return stored


def read_tensors(stored: Iterable[StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Iterate over names and tensors, file by file.

    Files are memory-mapped, and pages that were read count as this process's memory until the file is closed.
    So each file is reopened after a limited number of bytes.
    """
    for file, group in groupby(sorted(stored, key=attrgetter("file")), key=attrgetter("file")):
        rest = list(group)
        while rest:
            read = 0
            with safe_open(file, framework="pt") as opened:
                while rest and read < _MAX_MAPPED_BYTES:
                    entry = rest.pop(0)
                    tensor = entry.read(opened)
                    yield entry.name, tensor
                    read += tensor.nbytes
                    del tensor


def _read_headers(file: Path) -> Iterator[StoredTensor]:
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                view = tensors.get_slice(name)
                yield StoredTensor(name, view.get_dtype(), tuple(view.get_shape()), file)
    except SafetensorError as error:
        with file.open("rb") as opened:
            start = opened.read(2)
        if start == b"PK" or start[:1] == b"\x80":  # a zip archive or a bare pickle, as torch.save writes
            raise pickle_error(file) from None
        raise RequestError(
            f"not a safetensors file: {error}", where=str(file), remedy="fetch the file again"
        ) from None
