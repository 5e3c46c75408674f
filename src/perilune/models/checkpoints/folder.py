"""Access to the files of a checkpoint folder, and to no file outside it."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from perilune.errors import RequestError
from perilune.files import LFS_POINTER, read_json
from perilune.models.config.reader import Reader

WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_POINTER_BYTES = 1024  # maximum bytes of a Git LFS pointer
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class CheckpointFolder:
    """An untrusted folder. Names and links that lead out of it are refused."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise RequestError(
                "no such checkpoint folder",
                where=str(path),
                remedy="check the path; a run is named EXPERIMENT/STAGE, as in perilune runs",
            )
        self.path = path
        # The files of a snapshot in the Hugging Face cache are links into `blobs`, beside `snapshots`.
        inside = path.parent.parent if path.parent.name == "snapshots" else path
        self._root = inside.resolve()

    def file(self, name: str) -> Path:
        """Return the path of the file `name`, which need not exist.

        Raises:
            RequestError: when the name leads out of the folder, as a path or through a link, or when it
                exists and is not a regular file.
        """
        file = self.path / name
        if not name or name != Path(name).name or not file.resolve().is_relative_to(self._root):
            what = f"{name!r} leads out of the checkpoint folder"
            raise RequestError(what, where=str(self.path), remedy="copy the files into the folder")
        if file.exists() and not file.is_file():
            raise RequestError("is not a regular file", where=str(file))
        is_small = file.is_file() and file.stat().st_size < _POINTER_BYTES
        if is_small and file.read_bytes().startswith(LFS_POINTER):
            remedy = "run git lfs pull in the folder, or perilune model fetch OWNER/NAME"
            raise RequestError("is a Git LFS pointer, not the file itself", where=str(file), remedy=remedy)
        return file

    @cached_property
    def config(self) -> Reader:
        """The content of config.json.

        Raises:
            RequestError: when it is missing or malformed.
        """
        return self._read("config.json")

    def _read(self, name: str) -> Reader:
        file = self.file(name)
        return Reader(read_json(file), str(file))

    def end_tokens(self) -> tuple[int, ...]:
        """Return the end-of-sequence tokens in config.json and generation_config.json.

        Raises:
            RequestError: when a file is malformed.
        """
        readers = [self.config] if self.file("config.json").is_file() else []
        generation = "generation_config.json"
        readers += [self._read(generation)] if self.file(generation).is_file() else []
        return tuple(dict.fromkeys(end for read in readers for end in read.integers("eos_token_id")))

    def weight_files(self) -> list[Path]:
        """Return the safetensors files: the single file, which transformers prefers, or the indexed files."""
        if not self.file(WEIGHTS).exists() and self.file(_INDEX).exists():
            where = str(self.path / _INDEX)
            index = read_json(self.file(_INDEX))
            names = index.get("weight_map") if isinstance(index, Mapping) else None
            if not isinstance(names, Mapping) or not all(isinstance(name, str) for name in names.values()):
                raise RequestError("has no weight_map from tensor names to files", where=where)
            files = [self.file(name) for name in sorted(set(names.values()))]
        else:
            files = [self.file(WEIGHTS)]
        for file in files:
            if not file.is_file():
                raise self._missing_weights(file.name)
        return files

    def _missing_weights(self, name: str) -> RequestError:
        pickles = sorted(file for pattern in _PICKLES for file in self.path.glob(pattern))
        if pickles:
            return pickle_error(pickles[0])
        remedy = f"fetch the folder again; several weight files need {_INDEX}"
        return RequestError(f"no file {name}", where=str(self.path), remedy=remedy)


def pickle_error(file: Path) -> RequestError:
    """Return the error for weights in a format that can run code."""
    return RequestError(
        "is a pickle. Perilune does not open pickles, because reading one can run code",
        where=str(file),
        remedy="convert it with transformers: save_pretrained(..., safe_serialization=True)",
    )
