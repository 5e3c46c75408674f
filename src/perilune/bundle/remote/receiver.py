"""The receiver: how an attempt's files come to a machine, each content once, and on from where it was cut.

Standard library only, Python 3.8 or newer, Linux. It is sent over stdin behind the runner, as its verb
`receive`. Stdin goes on with a line of JSON, the list of files [[path, size, sha256, mode], ...];
then come contents, each a line [sha256, offset, length] and so many bytes. A call that has taken them answers
{"missing": {sha256: bytes that are here}, "busy": whether another call is sending}, until nothing is missing;
then the attempt's directory is made, whole or not at all, and it answers {"received": digest}.

Small contents are held in memory for one call. The others come to lie in the store.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from perilune.bundle.remote.runner import BLOCK, Attempt, RefusedError, main, sync_directory
from perilune.bundle.remote.store import SMALL, Store, copy

HELD = 1 << 24  # bytes of small contents that a call holds; what is more goes through the store
LINE = 1 << 26  # bytes of a line of JSON
STALLED = 60  # seconds without a byte after which the line counts as cut, though nobody has said so


class File(NamedTuple):
    """A file of the attempt, as the sender describes it."""

    path: str
    size: int
    sha256: str
    mode: str


def receive(attempt: Attempt, options: argparse.Namespace) -> dict[str, Any]:
    """Take what comes. Once nothing is missing, the files are there: whole, and as they were sent."""
    stream = Incoming(sys.stdin.buffer)
    files = listed(stream.line(), options)
    sizes = {file.sha256: file.size for file in files}
    refuse_begun(attempt)
    store = Store(attempt.run.parent / "store.sha256", options.share)
    try:
        store.make_room(sizes)
        held = take(stream, sizes, store)
        if store.missing(sizes, held):  # what was held goes with this call
            return {"missing": store.missing(sizes, {}), "busy": not store.lock()}
    finally:
        store.unlock()
    with attempt.lock():
        refuse_begun(attempt)
        if not assemble(attempt, files, store, held):
            return {"missing": store.missing(sizes, {}), "busy": False}
    store.shrink()
    store.unlock()
    return {"received": options.tree}


def refuse_begun(attempt: Attempt) -> None:
    if attempt.claimed_epochs()[-1:] >= [attempt.epoch]:
        raise RefusedError("this attempt or a newer one has begun here")


def listed(line: bytes, options: argparse.Namespace) -> list[File]:
    """The list of files, checked: plain relative paths, each once, no more bytes than were announced."""
    try:
        entries = json.loads(line)
        files = sorted(File(str(path), int(size), str(sha), str(mode)) for path, size, sha, mode in entries)
        digest = entries_digest(files)
    except (ValueError, TypeError):
        raise RefusedError("the list of files arrived damaged", "damaged") from None
    if digest != options.tree:
        raise RefusedError("the list of files is not the one that was sent", "damaged")
    for file in files:
        parts = file.path.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise RefusedError(f"{file.path!r} does not belong here", "damaged")
        if not re.fullmatch("[0-9a-f]{64}", file.sha256) or not re.fullmatch("[0-7]{4}", file.mode):
            raise RefusedError(f"{file.path!r} is not a plain file", "damaged")
    sizes = {file.sha256: file.size for file in files}
    if any(file.size < 0 or file.size != sizes[file.sha256] for file in files):
        raise RefusedError("the sizes contradict each other", "damaged")
    if sum(file.size for file in files) > options.bytes or len({file.path for file in files}) < len(files):
        raise RefusedError("there is more than was announced", "damaged")
    return files


def entries_digest(files: list[File]) -> str:
    """SHA-256 over path, size, content and mode of every file, as the other side computes it."""
    text = json.dumps(
        [file._asdict() for file in files], sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    return hashlib.sha256(text.encode()).hexdigest()


class Incoming:
    """What comes over stdin. When nothing comes for long the call ends, and lets go of its locks."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream

    def line(self) -> bytes:
        """The next line; of one that was cut, nothing."""
        with stall_timer():
            line = self.stream.readline(LINE)
        return line if line.endswith(b"\n") else b""

    def pieces(self, length: int) -> Iterator[bytes]:
        """So many bytes, as they come; fewer when they were cut."""
        while length > 0:
            with stall_timer():
                piece = self.stream.read1(min(BLOCK, length))  # type: ignore[attr-defined]
            if not piece:
                return
            length -= len(piece)
            yield piece


@contextlib.contextmanager
def stall_timer() -> Iterator[None]:
    signal.signal(signal.SIGALRM, stalled)
    signal.alarm(STALLED)
    yield
    signal.alarm(0)


def stalled(number: int, frame: Any) -> None:
    raise RefusedError(f"nothing came for {STALLED} s", "stalled")


def take(stream: Incoming, sizes: dict[str, int], store: Store) -> dict[str, bytes]:
    """Take contents until there are no more, or another call is found to send; returns the small ones."""
    held: dict[str, bytes] = {}
    while line := stream.line():
        try:
            sha256, offset, length = json.loads(line)
            fits = type(offset) is type(length) is int and 0 <= offset <= offset + length <= sizes[sha256]
        except (ValueError, TypeError, KeyError):
            fits = False
        if not fits:
            raise RefusedError("what arrived is damaged", "damaged")
        if sizes[sha256] <= SMALL and sum(map(len, held.values())) + length <= HELD:
            content = b"".join(stream.pieces(length))
            if hashlib.sha256(content).hexdigest() == sha256:
                held[sha256] = content
        elif store.lock():
            store.append(sha256, sizes[sha256], offset, stream.pieces(length))
        else:
            break
    return held


def assemble(attempt: Attempt, files: list[File], store: Store, held: dict[str, bytes]) -> bool:
    """Make the attempt's directory beside its name, and rename; False when something was not what it says."""
    for leftover in attempt.run.glob("tmp.*"):
        shutil.rmtree(str(leftover))
    building = attempt.run / f"tmp.{os.urandom(8).hex()}"
    building.mkdir()
    try:
        if not fill(building, files, store, held):
            return False
        for path in [*building.rglob("*"), building]:
            if path.is_dir():
                sync_directory(path)
        if attempt.files.exists():
            shutil.rmtree(str(attempt.files))
        building.rename(attempt.files)
        sync_directory(attempt.run)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise RefusedError(f"the list of files is damaged: {error}", "damaged") from None
    finally:
        shutil.rmtree(str(building), ignore_errors=True)
    return True


def fill(root: Path, files: list[File], store: Store, held: dict[str, bytes]) -> bool:
    """Put every file in its place, from memory and from the store; False when a content is wrong there."""
    sizes = {file.sha256: file.size for file in files if file.sha256 not in held}
    stays = store.has_room_for(sizes)
    if not stays and [sha256 for sha256 in sizes if not store.verified(sha256)]:
        return False
    placed: dict[str, Path] = {}
    for file in files:
        path = root.joinpath(*file.path.split("/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.sha256 in held:
            write_new(path, held[file.sha256])
        elif file.sha256 in placed:
            with placed[file.sha256].open("rb") as source:
                copy(source, path)
        elif not stays:
            store.entry(file.sha256).rename(path)
        elif not store.copied(file.sha256, path):
            continue
        placed[file.sha256] = path
    if len(placed) < len({file.sha256 for file in files}):
        return False
    for file in files:
        root.joinpath(*file.path.split("/")).chmod(int(file.mode, 8) & 0o777)
    return True


def write_new(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    sys.exit(main(receive))
