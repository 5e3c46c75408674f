"""Virtual environments for external programs, created once for each set of exact versions and then reused."""

import hashlib
import math
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
from perilune.files import locked


def check_pinned(requirements: Sequence[str]) -> None:
    """Check that all requirements name exact versions.

    Raises:
        RequestError: naming the first that is neither `name==version` nor a URL with `#sha256=`.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    for line in requirements:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            raise RequestError(f"'{line}' is not a requirement: {error}") from None
        exact = [
            pin for pin in requirement.specifier if pin.operator == "==" and not pin.version.endswith(".*")
        ]
        if not exact and "#sha256=" not in (requirement.url or ""):
            raise RequestError(f"'{line}' is not an exact version", remedy=f"{requirement.name}==VERSION")


def lock_lines(lock: Path) -> list[str]:
    """Return the requirements in a lock file in the format of pip and uv.

    Raises:
        RequestError: when the file cannot be read, or a version is not exact.
    """
    try:
        text = lock.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise RequestError("the lock file cannot be read", where=str(lock)) from None
    lines = [line.partition(" #")[0].strip() for line in text.replace("\\\n", " ").splitlines()]
    kept = [line for line in lines if line and not line.startswith("#")]
    check_pinned([line.partition(" --hash")[0] for line in kept])
    return kept


def interpreter(requirements: Sequence[str]) -> Path:
    """Return the Python of a virtual environment with only `requirements` and their dependencies.

    The environment stays in the user's cache, by Python version and requirements. pip keeps its settings.

    Raises:
        WorkFailedError: when the requirements cannot be installed.
    """
    text = "\n".join([platform.python_version(), sys.base_prefix, *requirements])
    name = f"black-box-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    folder = cache() / "environments" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    python = folder / "bin" / "python"
    with locked(folder.with_suffix(".lock"), wait=math.inf):  # two runs may create it at the same time
        if not (folder / "complete").exists():
            venv.create(folder, clear=True, with_pip=bool(requirements))
            if requirements:
                _install(python, requirements)
            (folder / "complete").touch()
    return python


def installed(python: Path) -> list[str]:
    """Return the packages of an environment, from `pip freeze`."""
    if not list((python.parent.parent / "lib").glob("python*/site-packages/pip")):
        return []
    frozen = subprocess.run(
        [python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True
    ).stdout
    return frozen.splitlines()


def record_digests(python: Path) -> dict[str, str]:
    """Return the `record_digest` of each distribution in an environment, by name."""
    folders = [str(path) for path in (python.parent.parent / "lib").glob("python*/site-packages")]
    digests = {package.name: record_digest(package) for package in distributions(path=folders)}
    return {name: digest for name, digest in sorted(digests.items()) if digest}


def cache() -> Path:
    """Return the directory of files that can be recreated."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "perilune"


def _install(python: Path, requirements: Sequence[str]) -> None:
    path = python.parent.parent / "requirements.txt"
    path.write_text("".join(f"{line}\n" for line in requirements), encoding="utf-8")
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install"]
    command += ["--progress-bar=off", "-r", str(path)]
    if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
        raise WorkFailedError(
            "pip could not install the requirements", where=str(path), remedy="see the log for pip's output"
        )
