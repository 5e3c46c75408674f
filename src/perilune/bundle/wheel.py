"""Builds the perilune wheel of a bundle from the imported package.

The same sources give the same bytes: names are sorted, timestamps are fixed, and nothing is compressed,
because the output of a compressor depends on its version. Binary distribution format:
packaging.python.org/specifications.
"""

import base64
import hashlib
import io
import os
import zipfile
import zlib
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import perilune
from perilune.errors import WorkFailedError

NAME = "perilune"
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)  # the earliest timestamp of zip files
_REGULAR_FILE = 0o100644 << 16


@cache
def build_wheel() -> tuple[str, bytes]:
    """Return the file name and bytes of a wheel of the running `perilune`.

    Built once per process, so that all bundles of one command have the same code.

    Raises:
        WorkFailedError: when perilune is not installed.
    """
    try:
        installed = distribution(NAME)
    except PackageNotFoundError:
        raise WorkFailedError(
            "perilune is not installed, so its dependencies are unknown",
            where=str(_package()),
            remedy="pip install -e .",
        ) from None
    version = installed.metadata["Version"]
    info = f"{NAME}-{version}.dist-info"
    files = {f"{NAME}/{relative}": data for relative, data in package_files().items()}
    files |= {f"{info}/{relative}": data for relative, data in _metadata(installed).items()}
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    return f"{NAME}-{version}-py3-none-any.whl", _archive(files)


def differing_files(wheel: Path) -> list[str]:
    """Return the files that differ between the running package and `wheel`, or exist only in one of them.

    Raises:
        WorkFailedError: when `wheel` is not a wheel.
    """
    running = {f"{NAME}/{name}": zlib.crc32(data) for name, data in package_files().items()}
    frozen = {name: crc for name, crc in wheel_members(wheel).items() if name.startswith(f"{NAME}/")}
    return sorted(name for name in running.keys() | frozen.keys() if running.get(name) != frozen.get(name))


def wheel_members(wheel: Path) -> dict[str, int]:
    """Return the CRC-32 of each member, from the zip directory.

    Raises:
        WorkFailedError: when `wheel` is not a wheel.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            return {member.filename: member.CRC for member in archive.infolist()}
    except (zipfile.BadZipFile, ValueError) as error:
        raise WorkFailedError(f"not a wheel: {error}", where=str(wheel)) from None


def package_files() -> dict[str, bytes]:
    """Return all files of the package by relative path, without caches and hidden files."""
    root = _package()
    files = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        inside = Path(folder).relative_to(root).as_posix() + "/" if folder != str(root) else ""
        for name in names:
            if not name.startswith(".") and not name.endswith(".pyc"):
                files[inside + name] = Path(folder, name).read_bytes()
    return files


def _package() -> Path:
    return Path(perilune.__path__[0])


def _metadata(installed: Distribution) -> dict[str, bytes]:
    known = installed.metadata
    lines = ["Metadata-Version: 2.1", f"Name: {NAME}", f"Version: {known['Version']}"]
    lines += [f"{key}: {known[key]}" for key in ("Summary", "Requires-Python") if key in known]
    lines += [f"Provides-Extra: {extra}" for extra in known.get_all("Provides-Extra") or []]
    lines += [f"Requires-Dist: {need}" for need in known.get_all("Requires-Dist") or []]
    files = {
        "METADATA": "\n".join(lines) + "\n",
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: {NAME}\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": installed.read_text("entry_points.txt") or "",
        "licenses/LICENSE": installed.read_text("licenses/LICENSE") or "",
    }
    return {name: text.encode() for name, text in files.items() if text}


def _record(files: dict[str, bytes], own_name: str) -> bytes:
    """Return RECORD: each file with its digest and size, except RECORD itself."""
    lines = []
    for name, data in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    return "\n".join([*lines, f"{own_name},,", ""]).encode()


def _archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            member = zipfile.ZipInfo(name, date_time=_TIMESTAMP)
            member.create_system = 3  # Unix, on every platform
            member.external_attr = _REGULAR_FILE
            archive.writestr(member, files[name])
    return buffer.getvalue()
