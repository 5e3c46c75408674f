"""URLs from which a machine can download the base model of an attempt, instead of receiving it over ssh.

The URLs point to public files on the Hugging Face hub, at the commit of the local copy. The machine checks
each file's digest.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from perilune.bundle.digest import Entry
from perilune.bundle.remote.store import SMALL_BYTES
from perilune.files import read_json

HUB_URL = "https://huggingface.co"
MODEL = "inputs/model/"  # the recipe's model in a bundle
SOURCE_FILE = "source.json"  # written by `perilune model fetch` beside a model
_REPOSITORY, _COMMIT = re.compile(r"[\w.-]+/[\w.-]+"), re.compile("[0-9a-f]{40}")
_SNAPSHOT = re.compile(r".*/models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")


def find_origins(directory: Path, entries: Sequence[Entry], hub: str) -> dict[str, str]:
    """Return the URL of each larger file of the base model, by SHA-256; empty if it is not from the hub.

    Args:
        directory, entries: an attempt's working copy and its files.
        hub: address of the hub.
    """
    repository, commit = _find_repository(directory)
    if not (_REPOSITORY.fullmatch(repository) and _COMMIT.fullmatch(commit)):
        return {}
    return {
        entry.sha256: f"{hub.rstrip('/')}/{repository}/resolve/{commit}/{quote(entry.path[len(MODEL) :])}"
        for entry in entries
        if entry.path.startswith(MODEL) and entry.size > SMALL_BYTES
    }


def _find_repository(directory: Path) -> tuple[str, str]:
    """Return the repository and commit of the model, from source.json or its Hugging Face cache path."""
    source = directory / MODEL / SOURCE_FILE
    if source.exists():
        document = read_json(source)
        return str(document.get("repository")), str(document.get("commit"))
    path = str(read_json(directory / "job.json")["model"].get("path"))
    match = _SNAPSHOT.fullmatch(path)
    return (f"{match['owner']}/{match['name']}", match["commit"]) if match else ("", "")
