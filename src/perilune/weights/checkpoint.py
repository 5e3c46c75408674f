"""The tensors of a checkpoint, with the names, shapes and dtypes of a server's model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.errors import RequestError
from perilune.models.checkpoints.folder import CheckpointFolder
from perilune.models.checkpoints.quantized import unquantized_tensors
from perilune.models.checkpoints.tensors import read_tensors

_STORED = ("F64", "F32", "F16", "BF16")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_tensors(folder: Path, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Read the tensors of a server's model from the checkpoint in `folder`, in the server's dtypes.

    Args:
        wanted: "dtype" and "shape" of each tensor of the server by name, as GET /v1/weights reports them.

    Raises:
        RequestError: when a tensor is missing, has another shape or is stored as integers, or when the
            server's dtype is neither float32 nor bfloat16.
    """
    stored = unquantized_tensors(CheckpointFolder(folder))
    for name, form in wanted.items():
        if name not in stored or list(stored[name].shape) != form["shape"]:
            raise RequestError(
                f"this checkpoint has no tensor {name} of shape {form['shape']}, but the server's model has",
                where=str(folder),
                remedy="push a checkpoint of the model that the server runs",
            )
        if stored[name].dtype not in _STORED:
            what = f"tensor {name} is {stored[name].dtype}, not one of {', '.join(_STORED)}"
            raise RequestError(what, where=str(stored[name].file), remedy="push floating-point weights")
        if form["dtype"] not in _DTYPES:
            what = f"the server has tensor {name} as {form['dtype']!r}, not as one of {', '.join(_DTYPES)}"
            raise RequestError(what, remedy="restart the server with one of these dtypes")
    tensors = read_tensors(stored[name] for name in wanted)
    return {name: tensor.to(_DTYPES[wanted[name]["dtype"]]) for name, tensor in tensors}
