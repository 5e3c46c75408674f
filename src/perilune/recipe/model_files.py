"""Finds the model of a recipe on this machine. Downloads nothing."""

from __future__ import annotations

import os
from pathlib import Path

from perilune.errors import RequestError
from perilune.files import read_regular
from perilune.recipe.problems import Problem, ProblemsError

LARGEST_TEMPLATE = 1 << 20  # bytes
REQUIRED = "config.json"  # the file that every Hugging Face model has


def find_model(path: str, base: Path) -> Path:
    """The absolute folder of a model: `path` is a folder (relative to `base`) or an id in the local cache.

    Raises:
        ProblemsError: when it is neither, or the folder is not a Hugging Face model.
    """
    folder = (base / Path(path).expanduser()).absolute()
    found = folder if folder.is_dir() else _cached(path)
    if found is None:
        what = f"model.path: no folder {folder}, and no model {path} in the Hugging Face cache"
        raise ProblemsError([Problem(("model", "path"), what, f"hf download {path}")])
    if not (found / REQUIRED).is_file():
        what = f"model.path: {found} has no {REQUIRED}"
        raise ProblemsError([Problem(("model", "path"), what, "a folder in Hugging Face format")])
    return found


def read_chat_template(path: str, base: Path) -> str:
    """The text of the chat template in the file `path` (relative to `base`).

    Raises:
        ProblemsError: when the file cannot be read.
    """
    file = (base / Path(path).expanduser()).absolute()
    try:
        return read_regular(file, LARGEST_TEMPLATE).decode("utf-8")
    except RequestError as error:
        what = f"model.chat_template: {file} cannot be read: {error.what}"
        raise ProblemsError([Problem(("model", "chat_template"), what, error.remedy)]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        what = f"model.chat_template: {file} cannot be read: {reason}"
        raise ProblemsError([Problem(("model", "chat_template"), what)]) from None


def _cached(model_id: str) -> Path | None:
    """The snapshot of the branch main of `model_id` in the Hugging Face cache, or None."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    if model_id.startswith((".", "/", "~")) or ".." in model_id:
        return None
    model = cache / f"models--{model_id.replace('/', '--')}"
    try:
        snapshot = model / "snapshots" / (model / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return snapshot if snapshot.is_dir() else None
