"""What is sent of an attempt's directory: the list of its files, and the contents that are missing there.

How much of it has gone is written beside the attempt, never into it, for whoever shows it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from perilune.bundle.digest import BUNDLE_FILE, Entry, describe, entries_digest, walk
from perilune.bundle.remote.store import SMALL
from perilune.errors import RequestError
from perilune.files import canonical_json, read_json, write_atomic

UNCALLED = 1 << 20  # bytes of small contents that are sent before anybody has asked for them
BLOCK = 1 << 20  # bytes
TELL_EVERY = 0.5  # seconds
SENT = "bytes sent"  # the unit of this progress


class Upload:
    """The files of an attempt's fresh directory.

    Args:
        node: for which of the attempt's machines.

    Attributes:
        tree: digest of all of them.
        size: bytes of all of them.
    """

    def __init__(self, directory: Path, node: int = 0) -> None:
        self.entries = list(_entries(directory))
        self.tree = entries_digest(self.entries)
        self.size = sum(entry.size for entry in self.entries)
        self._sources = {entry.sha256: directory / entry.path for entry in self.entries}
        self._sizes = {entry.sha256: entry.size for entry in self.entries}
        self._progress = directory.with_name(f"{directory.name}.sent-{node}.json")

    def small(self) -> dict[str, int]:
        """What is sent unasked: small contents, up to a limit."""
        found, room = {}, UNCALLED
        for sha256, size in sorted(self._sizes.items(), key=lambda one: one[1]):
            room -= size
            if size <= SMALL and room >= 0:
                found[sha256] = 0
        return found

    def wanted(self, missing: Any) -> dict[str, int]:
        """What the other side says it lacks, with how much of it is there, checked.

        Raises:
            ValueError: when it makes no sense.
        """
        wanted = {str(sha256): int(here) for sha256, here in dict(missing).items()}
        if not wanted or any(not 0 <= here <= self._sizes.get(sha256, -1) for sha256, here in wanted.items()):
            raise ValueError("it asks for what there is not")
        return wanted

    @contextmanager
    def stream(self, head: bytes, wanted: Mapping[str, int]) -> Iterator[BinaryIO]:
        """A stream of `head`, the list, and what is `wanted` from where it was cut; made while it is read."""
        reading, writing = os.pipe()

        def write() -> None:
            with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "wb") as out:
                out.write(head)
                out.write(canonical_json([_listed(entry) for entry in self.entries]) + b"\n")
                self._send(out, wanted)

        thread = threading.Thread(target=write, name="upload", daemon=True)
        thread.start()
        try:
            with os.fdopen(reading, "rb") as stream:
                yield stream
        finally:
            thread.join()
            self._progress.unlink(missing_ok=True)

    def _send(self, out: BinaryIO, wanted: Mapping[str, int]) -> None:
        done, told = sum(wanted.values()), time.monotonic()
        total = sum(self._sizes[sha256] for sha256 in wanted)
        for sha256, offset in sorted(wanted.items(), key=lambda one: self._sizes[one[0]]):
            length = self._sizes[sha256] - offset
            out.write(canonical_json([sha256, offset, length]) + b"\n")
            with self._sources[sha256].open("rb") as file:
                file.seek(offset)
                while data := file.read(min(BLOCK, length)):
                    out.write(data)
                    length -= len(data)
                    done += len(data)
                    if time.monotonic() - told >= TELL_EVERY:
                        told = time.monotonic()
                        document = {"done": done, "total": total, "unit": SENT, "figures": {}}
                        write_atomic(self._progress, canonical_json(document))


def read_sent(attempt: Path) -> dict[str, Any] | None:
    """How much has been sent of an attempt that is being staged, to all of its machines, as its progress."""
    found: list[dict[str, Any]] = []
    for path in attempt.parent.glob(f"{attempt.name}.sent-*.json"):
        with contextlib.suppress(RequestError):  # it has just been removed
            found.append(read_json(path))
    if not found:
        return None
    return found[0] | {key: sum(one[key] for one in found) for key in ("done", "total")}


def _entries(directory: Path) -> Iterator[Entry]:
    """Its files. What the bundle's list says of the frozen ones has been verified when they were copied."""
    frozen = {file["path"]: Entry(**file) for file in read_json(directory / BUNDLE_FILE)["files"]}
    for relative, status in walk(directory):
        if stat.S_ISREG(status.st_mode):
            yield frozen.get(relative) or describe(directory / relative, relative, status)


def _listed(entry: Entry) -> list[Any]:
    return [entry.path, entry.size, entry.sha256, entry.mode]
