"""Finds the model of a recipe on this machine. Downloads nothing."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from perilune.errors import RequestError
from perilune.recipe.problems import Problem, ProblemsError

CONFIG_FILE = "config.json"  # in the folder of every Hugging Face model
FINAL_CHECKPOINT = "artifacts/checkpoints/final"  # in the folder of a run


def find_model(path: str, base: Path) -> Path:
    """Return the absolute path of a model's folder, in Hugging Face format.

    Args:
        path: a folder or a GGUF file (relative to `base`), the name of a model that `perilune model fetch`
            keeps in the home, or an id in the local Hugging Face cache. A GGUF file is converted once.

    Raises:
        ProblemsError: when no such model exists, or the model cannot be read.
    """
    folder_path = (base / Path(path).expanduser()).absolute()
    found = folder_path if folder_path.exists() else _find_in_home(path) or _find_in_hub_cache(path)
    if found is None:
        is_path = path.startswith((".", "/", "~")) or path.endswith(".gguf")
        what = f"model.path: no file or folder {folder_path}"
        what += "" if is_path else f", and no model {path} is fetched or in the Hugging Face cache"
        remedy = "check the path" if is_path else f"perilune model fetch {path}"
        if "/" in path and not is_path:
            remedy += f"; if it is a run, {FINAL_CHECKPOINT} in the folder that perilune show {path} prints"
        raise ProblemsError([Problem(("model", "path"), what, remedy)])
    if found.is_dir() and not (found / CONFIG_FILE).is_file():
        files = sorted(found.glob("*.gguf"))
        remedy = str(files[0]) if files else "a folder in Hugging Face format, or a .gguf file"
        if (found / "adapter_config.json").is_file():
            merge = "merge it into its base model with PEFT and give the merged folder"
            if (found.parent / CONFIG_FILE).is_file():
                merge = f"{found.parent}, if that is the model with the adapter merged; otherwise {merge}"
            remedy = f"it is a LoRA adapter: {merge}"
        raise ProblemsError([Problem(("model", "path"), f"model.path: {found} has no {CONFIG_FILE}", remedy)])
    try:
        folder: Path = _import_store().resolve_model_folder(found)
    except RequestError as error:
        what = f"model.path: {error.where}: {error.what}"
        raise ProblemsError([Problem(("model", "path"), what, error.remedy)]) from None
    return folder


def _find_in_home(name: str) -> Path | None:
    """Return the folder of the model called `name` in the home, or None."""
    model = _import_store().find_stored_model(name)
    return None if model is None else model.folder


def _import_store() -> Any:
    """Import by name, because the control plane imports this module and must not depend on models."""
    return import_module("perilune.models.store")


def _find_in_hub_cache(model_id: str) -> Path | None:
    """Return the snapshot of the branch main of `model_id` in the Hugging Face cache, or None."""
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
