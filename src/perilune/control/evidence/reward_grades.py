"""Store the grade of the last reward audit in the home, by a digest of what was audited."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from perilune.control.record.home import Home
from perilune.errors import RequestError
from perilune.files import canonical_json, read_json, sha256_bytes, sha256_file, write_json


def store_grade(
    home: Home, section: Mapping[str, Any], files: Iterable[Path], grade: str, worst: str
) -> None:
    """Store the grade of an environment section and its rewards.

    Args:
        files: the files and folders that the section names; a grade holds only for their present contents.
        worst: the most serious finding, in one sentence.
    """
    write_json(_grade_path(home, section, files), {"grade": grade, "worst": worst, "time": time.time()})


def read_grade(home: Home, section: Mapping[str, Any], files: Iterable[Path]) -> dict[str, Any] | None:
    """Return what `store_grade` stored for exactly this section and these files; None if there is none."""
    path = _grade_path(home, section, files)
    try:
        stored = read_json(path) if path.is_file() else None
    except RequestError:
        return None
    return stored if isinstance(stored, dict) and stored.keys() == {"grade", "worst", "time"} else None


def _grade_path(home: Home, section: Mapping[str, Any], files: Iterable[Path]) -> Path:
    contents = [sha256_file(file) for path in files for file in _list_files(path)]
    return home.root / "reward_audits" / f"{sha256_bytes(canonical_json([section, contents]))}.json"


def _list_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.is_file())
    return [path] if path.is_file() else []
