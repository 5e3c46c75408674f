"""One read-only copy of a file for all frozen bundles of a home, named by its SHA-256.

Bundles hold hard links to the copy. They share our own wheel and large inputs, such as the weights of a base
model. The folder of a user is never linked, because the user may edit it in place.
"""

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from perilune.bundle import storage
from perilune.bundle.digest import BUNDLE_FILE
from perilune.files import read_json, sha256_file

WHEELS, INPUTS = "wheels", "inputs"  # folders in the home


@dataclass(frozen=True, slots=True)
class SharedFiles:
    """The files that bundles of a home link to: its shared copies, and the outputs of its stages."""

    home: Path

    def add_input(self, source: Path, target: Path) -> None:
        """Put an input into a bundle that is being built: by a hard link where the home has the file."""
        is_output = source.resolve().is_relative_to((self.home / "runs").resolve())  # the output of a stage
        size = source.stat().st_size
        if is_output or size < storage.LINK_BYTES or not self._link(source, size, target):
            storage.copy_file(source, target, storage.READ_ONLY, link=is_output)

    def _link(self, source: Path, size: int, target: Path) -> bool:
        try:
            if not any(path.stat().st_size == size for path in (self.home / INPUTS).glob("*")):
                return False
            shared_copy = self.home / INPUTS / sha256_file(source)
            if not _is_valid(shared_copy):
                return False
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(shared_copy, target)
        except OSError:  # a file system without links, or the copy has just been removed
            return False
        return True

    def share(self, bundle: Path) -> None:
        """Share the wheel and the large inputs of a bundle that has just been frozen.

        A link appears whole or not at all, so a kill leaves no partial copy. Where the file system has no
        links, the bundle keeps files of its own.
        """
        for entry in read_json(bundle / BUNDLE_FILE)["files"]:
            folder, _, name = entry["path"].partition("/")
            path, digest = bundle / entry["path"], entry["sha256"]
            if folder == "scripts" and name.endswith(".whl"):
                _share(path, self.home / WHEELS / digest)
            elif folder == "inputs" and entry["size"] >= storage.LINK_BYTES and path.stat().st_nlink == 1:
                _share(path, self.home / INPUTS / digest)

    def remove_unused(self) -> None:
        """Remove the copies that no bundle has a link to."""
        for folder in (WHEELS, INPUTS):
            for shared_copy in (self.home / folder).glob("*"):
                with contextlib.suppress(FileNotFoundError):
                    if shared_copy.stat().st_nlink == 1:
                        shared_copy.unlink()


def _share(path: Path, shared_copy: Path) -> None:
    shared_copy.parent.mkdir(exist_ok=True)
    link = path.with_name(f".{path.name}.tmp")
    with contextlib.suppress(OSError):  # a file system without links, or the copy has just been removed
        if not _is_valid(shared_copy):
            shared_copy.unlink(missing_ok=True)
            os.link(path, shared_copy)
        else:
            os.link(shared_copy, link)
            link.replace(path)


def _is_valid(shared_copy: Path) -> bool:
    """Return whether the copy exists, is read-only, and has the digest that its name states."""
    try:
        mode = stat.S_IMODE(shared_copy.stat().st_mode)
        return mode == storage.READ_ONLY and sha256_file(shared_copy) == shared_copy.name
    except FileNotFoundError:
        return False
