"""An environment of its own for somebody else's code: made once for each set of exact versions, then kept."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from perilune.bundle.lock import record_digest
from perilune.errors import RequestError, WorkFailedError


def check_pinned(requirements: Sequence[str]) -> None:
    """Refuse requirements that may mean another package tomorrow.

    Raises:
        RequestError: naming the first that is not `name==version`, or a URL with its `#sha256=`.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    for line in requirements:
        try:
            found = Requirement(line)
        except InvalidRequirement as error:
            raise RequestError(f"'{line}' is no requirement: {error}") from None
        pins = [one for one in found.specifier if one.operator == "==" and not one.version.endswith(".*")]
        if not pins and "#sha256=" not in (found.url or ""):
            raise RequestError(f"'{line}' is no exact version", remedy=f"{found.name}==VERSION")


def lock_lines(lock: Path) -> list[str]:
    """The requirements in a lock file, as pip and uv write them.

    Raises:
        RequestError: when it cannot be read, or names a version that is not exact.
    """
    try:
        text = lock.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise RequestError("the lock cannot be read", where=str(lock)) from None
    lines = [line.partition(" #")[0].strip() for line in text.replace("\\\n", " ").splitlines()]
    kept = [line for line in lines if line and not line.startswith("#")]
    check_pinned([line.partition(" --hash")[0] for line in kept])
    return kept


def interpreter(requirements: Sequence[str]) -> Path:
    """The Python of an environment that has `requirements` and what they need, and nothing else.

    Kept in the user's cache, by Python's version and the requirements. pip's own settings hold.

    Raises:
        WorkFailedError: when they cannot be installed.
    """
    text = "\n".join([platform.python_version(), sys.base_prefix, *requirements])
    name = f"black-box-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    folder = cache() / "environments" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    python = folder / "bin" / "python"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs may start here at once
        if not (folder / "complete").exists():
            venv.create(folder, clear=True, with_pip=bool(requirements))
            if requirements:
                _install(python, requirements)
            (folder / "complete").touch()
    return python


def installed(python: Path) -> list[str]:
    """What is in an environment, as `pip freeze` says it."""
    if not list((python.parent.parent / "lib").glob("python*/site-packages/pip")):
        return []
    frozen = subprocess.run(
        [python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True
    ).stdout
    return frozen.splitlines()


def record_digests(python: Path) -> dict[str, str]:
    """`record_digest` of each distribution in an environment, by name."""
    folders = [str(path) for path in (python.parent.parent / "lib").glob("python*/site-packages")]
    digests = {found.name: record_digest(found) for found in distributions(path=folders)}
    return {name: digest for name, digest in sorted(digests.items()) if digest}


def cache() -> Path:
    """Where what can be made again is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "perilune"


def _install(python: Path, requirements: Sequence[str]) -> None:
    listed = python.parent.parent / "requirements.txt"
    listed.write_text("".join(f"{line}\n" for line in requirements), encoding="utf-8")
    command = [
        str(python),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--progress-bar=off",
        "-r",
        str(listed),
    ]
    if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
        raise WorkFailedError(
            "pip could not install what it needs", where=str(listed), remedy="its words are in the log"
        )
