"""Learner checkpoints: directories that are either complete or absent.

    weights.safetensors, first_moments.safetensors, second_moments.safetensors, state.json, manifest.json

Files are written to a temporary directory and fsynced, with the manifest last. Then the directory is renamed.
"""

import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from perilune.errors import RequestError
from perilune.files import fsync_directory, read_json, sha256_file, write_atomic, write_json

MANIFEST = "manifest.json"
_DELETE = "delete this checkpoint; the previous one is then used"
_SAME_MODEL = "use a checkpoint of the same model, trained with the same `lora` section"


def write(directory: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    """Write one safetensors file per name in `tensors`, and `state` as JSON. Replace an older checkpoint."""
    temporary = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.tmp")
    try:
        for name, values in tensors.items():
            payload = save({key: value.contiguous().cpu() for key, value in values.items()})
            write_atomic(temporary / f"{name}.safetensors", payload)
        write_json(temporary / "state.json", state)
        files = {path.name: sha256_file(path) for path in sorted(temporary.iterdir())}
        write_json(temporary / MANIFEST, {"files": files})
        if directory.exists():
            old = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.old")
            directory.rename(old)
            temporary.rename(directory)
            shutil.rmtree(old)
        else:
            temporary.rename(directory)
        fsync_directory(directory.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read(directory: Path, names: Iterable[str]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Read the named safetensors files and the state, each checked against the manifest.

    Raises:
        RequestError: naming a file that is missing or was changed.
    """
    names = tuple(names)
    files = read_json(directory / MANIFEST).get("files", {})
    for file in ("state.json", *(f"{name}.safetensors" for name in names)):
        path = directory / file
        if not path.is_file() or sha256_file(path) != files.get(file):
            raise RequestError(
                f"{file} is missing or differs from the manifest",
                where=str(directory),
                remedy=_DELETE,
            )
    tensors = {}
    for name in names:
        try:
            tensors[name] = load_file(directory / f"{name}.safetensors")
        except SafetensorError as error:
            where = str(directory / f"{name}.safetensors")
            raise RequestError(f"not a safetensors file: {error}", where=where, remedy=_DELETE) from None
    state: dict[str, Any] = read_json(directory / "state.json")
    return tensors, state


@torch.no_grad()
def copy_into(own: Mapping[str, Tensor], loaded: Mapping[str, Tensor], directory: Path) -> None:
    """Copy `loaded` into `own` by name, bit for bit.

    Args:
        directory: the checkpoint, for error messages.

    Raises:
        RequestError: as `check_fits`.
    """
    check_fits(own, loaded, directory)
    for name, tensor in own.items():
        tensor.copy_(loaded[name])


def check_fits(own: Mapping[str, Tensor], loaded: Mapping[str, Tensor], directory: Path) -> None:
    """Check that loaded tensors have the names, shapes and dtypes of `own`.

    Raises:
        RequestError: naming a tensor that is missing, unknown, or of another shape or dtype.
    """
    unmatched = sorted(own.keys() ^ loaded.keys())
    if unmatched:
        problem = "missing" if unmatched[0] in own else "not part of this model"
        raise RequestError(f"tensor {unmatched[0]} is {problem}", where=str(directory), remedy=_SAME_MODEL)
    for name, tensor in own.items():
        source = loaded[name]
        if source.shape != tensor.shape or source.dtype != tensor.dtype:
            raise RequestError(
                f"tensor {name} is {source.dtype} {list(source.shape)}, "
                f"the model has {tensor.dtype} {list(tensor.shape)}",
                where=str(directory),
                remedy=_SAME_MODEL,
            )


def find_latest_complete(parent: Path) -> Path | None:
    """Return the last complete checkpoint in `parent` by name (step-000020 after step-000010), or None."""
    if not parent.is_dir():
        return None
    for directory in sorted(parent.iterdir(), reverse=True):
        if not directory.name.startswith(".") and is_complete(directory):
            return directory
    return None


def is_complete(directory: Path) -> bool:
    """Return whether the manifest exists and every file in it has the recorded digest."""
    try:
        files = read_json(directory / MANIFEST)["files"]
        return all(sha256_file(directory / name) == digest for name, digest in files.items())
    except (RequestError, OSError, KeyError, TypeError, AttributeError):
        return False
