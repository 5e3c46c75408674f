"""requirements.lock: exact versions of all packages that a job needs, and digests of their files."""

import csv
import json
import re
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points
from pathlib import Path

from perilune.bundle.plugin import PLUGIN_GROUP
from perilune.bundle.wheel import NAME
from perilune.errors import WorkFailedError
from perilune.files import sha256_bytes

# What an installer writes into the folder of the metadata, beside the files of the wheel.
_BY_THE_INSTALLER = {"INSTALLER", "REQUESTED", "RECORD", "RECORD.jws", "direct_url.json", "uv_cache.json"}


@cache
def requirements_lock(task: str) -> str:
    """Lines "name==version  # record sha256:DIGEST" for installed distributions.

    Lists the dependencies of perilune and of the plugin that owns `task`. Follows the declared dependencies
    whose markers apply here, and only requested extras. Omits Perilune, which the bundle contains as a wheel.
    The digest is that of `record_digest`, if there is one.

    Raises:
        WorkFailedError: when a declared dependency is not installed.
    """
    waiting = [(NAME, frozenset[str]()), *((owner, frozenset[str]()) for owner in _owners(task))]
    seen: set[tuple[str, frozenset[str]]] = set()
    locked: dict[str, str] = {}
    while waiting:
        name, extras = waiting.pop()
        if (_normal(name), extras) in seen:
            continue
        seen.add((_normal(name), extras))
        locked[_normal(name)] = _locked(_find(name))
        waiting += _needs(name, extras)
    del locked[_normal(NAME)]
    return "".join(f"{name}=={found}\n" for name, found in sorted(locked.items()))


@cache
def record_digest(installed: Distribution) -> str | None:
    """SHA-256 over the paths and hashes in the RECORD of an installed distribution.

    Left out is what an installer generates: bytecode, scripts (their first line names the interpreter) and
    its notes in the .dist-info folder. Two installations of one wheel therefore agree, and wheels with one
    version number and different files do not. RECORD holds the hashes at the time of the installation, so an
    edit of an installed file does not show. None without hashes: an editable installation, or a package of
    the system.

    Source: packaging.python.org/specifications/recording-installed-packages.
    """
    record = installed.read_text("RECORD")
    if record is None or editable_root(installed) is not None:
        return None
    rows = [row for row in csv.reader(record.splitlines()) if len(row) > 1 and row[1]]
    files = sorted((path.replace("../", ""), digest) for path, digest, *_ in rows if _is_from_wheel(path))
    return sha256_bytes("".join(f"{path},{digest}\n" for path, digest in files).encode()) if files else None


def _is_from_wheel(path: str) -> bool:
    # Plain strings: torch alone has ten thousand files, and every stage checks them.
    folders, _, name = path.rpartition("/")
    folder = folders.rpartition("/")[2]
    if folder.endswith(".dist-info") and name in _BY_THE_INSTALLER:
        return False
    outside = path.startswith("../")
    return not name.endswith(".pyc") and not (outside and folder in {"bin", "Scripts"})


def editable_root(installed: Distribution) -> Path | None:
    """The folder that an editable installation runs from; None for others."""
    text = installed.read_text("direct_url.json")
    if text is None:
        return None
    origin = json.loads(text)
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(str(origin["url"]).removeprefix("file://"))


def _locked(installed: Distribution) -> str:
    digest = record_digest(installed)
    return installed.version + (f"  # record sha256:{digest}" if digest else "")


def _owners(task: str) -> list[str]:
    """Distributions that register the task plugin called `task`."""
    points = entry_points(group=PLUGIN_GROUP, name=task)
    return [point.dist.name for point in points if point.dist is not None]


@cache
def _find(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        raise WorkFailedError(
            f"the dependency {name} is not installed", remedy=f"pip install {name}, or reinstall perilune"
        ) from None


@cache
def _needs(name: str, extras: frozenset[str]) -> list[tuple[str, frozenset[str]]]:
    """The requirements of a distribution on this machine, with the given extras."""
    from packaging.requirements import Requirement

    needs = []
    for text in _find(name).requires or []:
        need = Requirement(text)
        holds = need.marker is None or any(
            need.marker.evaluate({"extra": extra}) for extra in (extras or {""})
        )
        if holds:
            needs.append((need.name, frozenset(need.extras)))
    return needs


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
