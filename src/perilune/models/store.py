"""The models in the home: models that `perilune model fetch` has downloaded, and converted GGUF files.

Each model is a Hugging Face folder with a file source.json, which records its origin. A folder is built under
a temporary name and renamed when it is complete, so an interruption never leaves an incomplete model.
"""

import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.errors import RequestError
from perilune.files import fsync_directory, home_directory, locked, read_json, sha256_file, write_json
from perilune.terminal import escape_control

SOURCE = "source.json"
GGUF_SUFFIX = ".gguf"
_CONVERTER_VERSION = 1  # increase it when the converter writes other files, so that old ones are not reused
_GGUF_PREFIX = "gguf-"  # of the names of converted GGUF files
_READ_ONLY = 0o444  # lets bundles hard-link the files


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in the home."""

    name: str
    folder: Path
    source: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        """Size of its files."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


def models_folder() -> Path:
    return home_directory() / "models"


def list_stored_models() -> list[StoredModel]:
    """Return all complete models in the home, sorted by name."""
    folders = sorted(path for path in models_folder().glob("[!.]*") if (path / SOURCE).is_file())
    return [StoredModel(_display_name(path.name), path, read_json(path / SOURCE)) for path in folders]


def find_stored_model(name: str) -> StoredModel | None:
    folder = models_folder() / _file_name(name)
    if folder.parent != models_folder() or folder.name.startswith(".") or not (folder / SOURCE).is_file():
        return None
    return StoredModel(name, folder, read_json(folder / SOURCE))


def remove_model(name: str) -> StoredModel:
    """Delete the model called `name` and return its description. Bundles of runs keep their own copies.

    Raises:
        RequestError: when there is no such model.
    """
    model = find_stored_model(name)
    if model is None:
        raise RequestError(
            f"no model {name} in the home",
            where=str(models_folder()),
            remedy="list the models: perilune model list",
        )
    with _lock_build_folder(model.folder) as building:
        model.folder.rename(building)
    return model


def ensure_model(name: str, build: Callable[[Path], Mapping[str, Any]]) -> StoredModel:
    """Return the model called `name`, and build it if it isn't in the home.

    Args:
        build: writes the files to a folder and returns the content of source.json. The folder may contain
            files of an interrupted build.
    """
    final = models_folder() / _file_name(name)
    if find_stored_model(name) is None:
        with _lock_build_folder(final, keep_on_error=True) as building:
            if find_stored_model(name) is None:  # another process may have built it meanwhile
                building.mkdir(exist_ok=True)
                write_json(building / SOURCE, dict(build(building)))
                for file in building.rglob("*"):
                    if file.is_file():
                        file.chmod(_READ_ONLY)
                building.rename(final)
                fsync_directory(final.parent)
    return StoredModel(name, final, read_json(final / SOURCE))


def ensure_gguf_converted(path: Path) -> Path:
    """Return the Hugging Face folder of the GGUF file at `path`, converted once and kept in the home.

    Raises:
        RequestError: when the file is malformed or the model is not supported.
    """
    from perilune.models.gguf.header import read_header

    read_header(path)  # refuse other files before the digest reads them completely
    digest = sha256_file(path)

    def build(folder: Path) -> dict[str, Any]:
        from perilune.models.gguf.convert import convert

        print(
            f"converting {escape_control(str(path))} once, for {folder.parent}", file=sys.stderr, flush=True
        )
        convert(path, folder)
        return {"kind": "gguf", "file": path.name, "sha256": digest}

    return ensure_model(f"{_GGUF_PREFIX}{digest}.{_CONVERTER_VERSION}", build).folder


def resolve_model_folder(path: Path) -> Path:
    """Return the Hugging Face folder of the model at `path`: the folder itself, or a converted GGUF file.

    Raises:
        RequestError: when the file is malformed or the model is not supported.
    """
    if path.is_dir() or not path.exists():
        return path
    if path.suffix.lower() != GGUF_SUFFIX:
        remedy = "give a folder in Hugging Face format, or a .gguf file"
        raise RequestError("is not a model", where=str(path), remedy=remedy)
    return ensure_gguf_converted(path)


@contextmanager
def _lock_build_folder(final: Path, *, keep_on_error: bool = False) -> Iterator[Path]:
    """Lock the folder in which `final` is built, and delete the folder at the end if it still exists.

    Args:
        keep_on_error: keep its files after an error, so that the next build can resume.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    building = final.with_name(f".{final.name}.partial")
    with locked(final.with_name(f".{final.name}.lock"), wait=math.inf):
        try:
            yield building
        except BaseException:
            if not keep_on_error:
                shutil.rmtree(building, ignore_errors=True)
            raise
        shutil.rmtree(building, ignore_errors=True)


def _file_name(name: str) -> str:
    """Return the folder name of a model: the slash of "owner/name" becomes two dashes."""
    return name.replace("/", "--")


def _display_name(file_name: str) -> str:
    return file_name if file_name.startswith(_GGUF_PREFIX) else file_name.replace("--", "/", 1)
