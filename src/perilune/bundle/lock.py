"""requirements.lock: exact versions of all packages that a job needs, and digests of their files."""

import csv
import json
import re
from email import message_from_string
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points
from pathlib import Path

from perilune.bundle.plugin import PLUGIN_GROUP
from perilune.bundle.wheel import NAME
from perilune.errors import WorkFailedError
from perilune.files import sha256_bytes

# Files that an installer adds to the .dist-info folder.
_INSTALLER_FILES = {"INSTALLER", "REQUESTED", "RECORD", "RECORD.jws", "direct_url.json", "uv_cache.json"}


@cache
def requirements_lock(task: str) -> str:
    """Return the lines "name==version  # record sha256:DIGEST" of installed distributions.

    Lists the dependencies of perilune and of the plugin that owns `task`. Follows the declared dependencies
    whose markers apply here, and only requested extras. Omits Perilune, which the bundle contains as a wheel.
    The digest is that of `record_digest`, if there is one.

    Raises:
        WorkFailedError: when a declared dependency is not installed.
    """
    plugins = entry_points(group=PLUGIN_GROUP, name=task)
    owners = [plugin.dist.name for plugin in plugins if plugin.dist is not None]
    waiting = [(name, frozenset[str]()) for name in (NAME, *owners)]
    visited: set[tuple[str, frozenset[str]]] = set()
    locked: dict[str, str] = {}
    while waiting:
        name, extras = waiting.pop()
        if (_normalize(name), extras) in visited:
            continue
        visited.add((_normalize(name), extras))
        installed = _find_distribution(name)
        digest = record_digest(installed)
        record = f"  # record sha256:{digest}" if digest else ""
        locked[_normalize(name)] = read_metadata(installed)[1] + record
        waiting += _requirements(name, extras)
    del locked[_normalize(NAME)]
    return "".join(f"{name}=={version}\n" for name, version in sorted(locked.items()))


@cache
def record_digest(installed: Distribution) -> str | None:
    """Return SHA-256 over the paths and hashes in the RECORD of an installed distribution.

    Files that an installer generates are omitted: bytecode, scripts (their first line names the interpreter)
    and its notes in the .dist-info folder. Two installations of one wheel therefore have the same digest, and
    wheels with one version number and different files have different digests. RECORD has the hashes at the
    time of the installation, so edits of installed files do not change the digest. Returns None without
    hashes, for an editable installation or a system package.

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
    if folder.endswith(".dist-info") and name in _INSTALLER_FILES:
        return False
    outside = path.startswith("../")
    return not name.endswith(".pyc") and not (outside and folder in {"bin", "Scripts"})


def editable_root(installed: Distribution) -> Path | None:
    """Return the folder that an editable installation runs from; None for others."""
    text = installed.read_text("direct_url.json")
    if text is None:
        return None
    origin = json.loads(text)
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(str(origin["url"]).removeprefix("file://"))


@cache
def read_metadata(installed: Distribution) -> tuple[str, str, list[str]]:
    """Return the name, the version and the requirements of a distribution.

    `Distribution` parses METADATA at every access, with the description, which is nearly all of it.
    """
    text = installed.read_text("METADATA")
    if text is None:  # an egg
        return installed.name, installed.version, installed.requires or []
    fields = message_from_string(text.partition("\n\n")[0])
    return fields["Name"], fields["Version"], fields.get_all("Requires-Dist", [])


@cache
def _find_distribution(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        raise WorkFailedError(
            f"the dependency {name} is not installed", remedy=f"pip install {name}, or reinstall perilune"
        ) from None


@cache
def _requirements(name: str, extras: frozenset[str]) -> list[tuple[str, frozenset[str]]]:
    """Return the requirements of a distribution on this machine, with the given extras."""
    from packaging.requirements import Requirement

    needs = []
    for text in read_metadata(_find_distribution(name))[2]:
        need = Requirement(text)
        holds = need.marker is None or any(
            need.marker.evaluate({"extra": extra}) for extra in (extras or {""})
        )
        if holds:
            needs.append((need.name, frozenset(need.extras)))
    return needs


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
