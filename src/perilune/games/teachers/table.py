"""Solved games: tables of move probabilities, cached in files."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perilune.files import canonical_json, home_directory, sha256_bytes, write_atomic

CACHE_FOLDER = "teachers"  # in the home directory

PolicyTable = Mapping[str, Mapping[int, float]]
"""Action probabilities by information state. Actions of probability 0 are left out."""


def load_or_solve(request: Mapping[str, Any], solve: Callable[[], PolicyTable]) -> PolicyTable:
    """Read the table that `request` describes from its file, or call `solve` and cache the result.

    The file is named after a digest of the request and written atomically. A file that is damaged or contains
    another table is logged and replaced.

    Args:
        request: everything that determines the table: game, algorithm, iterations, seed, versions.
    """
    name = f"{request['algorithm']}-{sha256_bytes(canonical_json(request))}.json"
    path = home_directory() / CACHE_FOLDER / name
    log = logging.getLogger(__name__)
    if path.exists():
        try:
            return _read_table(path, request)
        except Exception as error:  # a damaged file may raise anything
            log.warning("%s is damaged (%s); solving the game again", path, error)
    table = {key: {action: p for action, p in row.items() if p > 0} for key, row in solve().items()}
    rows = canonical_json({key: list(row.items()) for key, row in table.items()})
    try:
        write_atomic(path, canonical_json({"request": request, "sha256": sha256_bytes(rows)}) + b"\n" + rows)
    except OSError as error:
        log.warning("cannot write %s (%s); the game will be solved again next time", path, error.strerror)
    return table


def _read_table(path: Path, request: Mapping[str, Any]) -> PolicyTable:
    about, _, rows = path.read_bytes().partition(b"\n")
    if json.loads(about) != {"request": request, "sha256": sha256_bytes(rows)}:
        raise ValueError("it belongs to another request, or its digest does not match")
    return {key: dict(row) for key, row in json.loads(rows).items()}
