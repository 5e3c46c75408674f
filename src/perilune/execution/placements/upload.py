"""Upload of an attempt's directory: the list of its files, and the contents that the other side lacks.

The list may also name files whose contents only the other side has: checkpoints of an attempt that ran there.

Progress is written to a file beside the attempt's directory, never into it.
"""

import contextlib
import os
import select
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from perilune.bundle.digest import BUNDLE_FILE, Entry, entries_digest, make_entry, walk
from perilune.bundle.remote.store import SMALL_BYTES
from perilune.errors import RequestError
from perilune.execution.placements.origins import find_origins
from perilune.files import canonical_json, read_json, write_atomic

UNREQUESTED_BYTES = 1 << 20  # of small contents, sent before the other side asks for them
BLOCK_BYTES = 1 << 20
REPORT_INTERVAL_S = 0.5
ENDED_MILLISECONDS = 100  # between two checks whether the stream has ended
SENT_UNIT = "bytes sent"  # the unit of the upload's progress


class Upload:
    """The files of an attempt's fresh directory.

    Args:
        held: more files, whose contents the machine has kept.
        hub: URL of the Hugging Face hub that the machine may download the base model from; "" for none.

    Attributes:
        tree: digest of all files.
        size: of all files, in bytes.
    """

    def __init__(self, directory: Path, node: int = 0, held: Sequence[Entry] = (), hub: str = "") -> None:
        own = list(_list_entries(directory))
        here = {entry.path for entry in own}
        self.entries = sorted([*own, *(entry for entry in held if entry.path not in here)])
        self.tree = entries_digest(self.entries)
        self.size = sum(entry.size for entry in self.entries)
        self._sources = {entry.sha256: directory / entry.path for entry in own}
        self._sizes = {entry.sha256: entry.size for entry in self.entries}
        self._origins = find_origins(directory, own, hub) if hub else {}
        self._progress = directory.with_name(f"{directory.name}.sent-{node}.json")

    def small_contents(self) -> dict[str, int]:
        """Return the small contents to send without being asked, up to a limit, as {SHA-256: offset 0}."""
        contents, room = {}, UNREQUESTED_BYTES
        for sha256, size in sorted(self._sizes.items(), key=lambda item: item[1]):
            room -= size
            if size <= SMALL_BYTES and room >= 0 and sha256 in self._sources:
                contents[sha256] = 0
        return contents

    def has_lost(self, wanted: Mapping[str, int]) -> bool:
        """Return whether the machine asks for held content, because its store has evicted it since."""
        return not wanted.keys() <= self._sources.keys()

    def parse_wanted(self, missing: Any) -> dict[str, int]:
        """Return the contents that the other side lacks, with the bytes of each that it has, validated.

        Raises:
            ValueError: the list is malformed.
        """
        wanted = {str(sha256): int(here) for sha256, here in dict(missing).items()}
        if not wanted or any(not 0 <= here <= self._sizes.get(sha256, -1) for sha256, here in wanted.items()):
            raise ValueError("it asks for contents that do not exist")
        return wanted

    @contextmanager
    def stream(self, head: bytes, wanted: Mapping[str, int]) -> Iterator[BinaryIO]:
        """Yield a stream of `head`, the list of files, and the `wanted` contents from their offsets.

        A thread writes the stream while it is read. The stream ends with the block, even if other processes
        still read from it.
        """
        reading, writing = os.pipe()
        ended = threading.Event()

        def write() -> None:
            try:
                for data in self._data(head, wanted):
                    _write(writing, data, ended)
            except BrokenPipeError:  # the reader has ended
                pass
            finally:
                os.close(writing)

        thread = threading.Thread(target=write, name="upload", daemon=True)
        thread.start()
        with os.fdopen(reading, "rb") as stream:
            try:
                yield stream
            finally:
                ended.set()
                thread.join()
                self._progress.unlink(missing_ok=True)

    def _data(self, head: bytes, wanted: Mapping[str, int]) -> Iterator[bytes]:
        """Yield the content of the stream. Reports progress meanwhile."""
        yield head + canonical_json({"files": self.entries, "origins": self._origins}) + b"\n"
        done, reported = sum(wanted.values()), time.monotonic()
        total = sum(self._sizes[sha256] for sha256 in wanted)
        for sha256, offset in sorted(wanted.items(), key=lambda item: self._sizes[item[0]]):
            length = self._sizes[sha256] - offset
            yield canonical_json([sha256, offset, length]) + b"\n"
            with self._sources[sha256].open("rb") as file:
                file.seek(offset)
                while data := file.read(min(BLOCK_BYTES, length)):
                    yield data
                    length -= len(data)
                    done += len(data)
                    if time.monotonic() - reported >= REPORT_INTERVAL_S:
                        reported = time.monotonic()
                        document = {"done": done, "total": total, "unit": SENT_UNIT, "figures": {}}
                        with contextlib.suppress(OSError):  # a full disk here must not stop the upload
                            write_atomic(self._progress, canonical_json(document))


def _write(pipe: int, data: bytes, ended: threading.Event) -> None:
    """Write to a pipe. Raises BrokenPipeError once `ended` is set, even if nothing reads from the pipe."""
    os.set_blocking(pipe, False)
    writable, left = select.poll(), memoryview(data)
    writable.register(pipe, select.POLLOUT)
    while left:
        if ended.is_set():
            raise BrokenPipeError
        if writable.poll(ENDED_MILLISECONDS):
            left = left[os.write(pipe, left) :]


def read_upload_progress(attempt: Path) -> dict[str, Any] | None:
    """Return the progress of uploading an attempt to all of its machines; None without an upload."""
    documents: list[dict[str, Any]] = []
    for path in attempt.parent.glob(f"{attempt.name}.sent-*.json"):
        with contextlib.suppress(RequestError):  # just removed
            documents.append(read_json(path))
    if not documents:
        return None
    return documents[0] | {key: sum(document[key] for document in documents) for key in ("done", "total")}


def _list_entries(directory: Path) -> Iterator[Entry]:
    """Yield the files in `directory`. The hashes of frozen files were verified when they were copied."""
    frozen = {file["path"]: Entry(**file) for file in read_json(directory / BUNDLE_FILE)["files"]}
    for relative, status in walk(directory):
        if stat.S_ISREG(status.st_mode):
            yield frozen.get(relative) or make_entry(directory / relative, relative, status)
