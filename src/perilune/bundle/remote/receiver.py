"""The receiver: stores the uploaded files of an attempt. Each content is sent once, and transfers resume.

Standard library only, Python 3.8 or newer, Linux. Perilune sends it on stdin after the runner and the store,
to execute the verb `receive`. Stdin continues with one line of JSON, {"files": [[path, size, sha256, mode],
...], "origins": {sha256: URL of a content that the machine may download instead of receiving it}}. Then come
contents: for each a line [sha256, offset, length] and `length` bytes. While contents are missing, the call
answers {"missing": {sha256: bytes received so far}, "busy": whether another call is sending}. Otherwise it
creates the attempt's directory atomically and answers {"received": digest}.

Small contents are held in memory for one call. The others are kept in the store.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
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
from perilune.bundle.remote.store import SMALL_BYTES, Store, copy

MAX_HELD_BYTES = 1 << 24  # bytes of small contents that a call holds in memory; more go through the store
MAX_LINE_BYTES = 1 << 26  # maximum bytes of a line of JSON
STALL_TIMEOUT_S = 60  # seconds without a byte after which the connection counts as broken


class File(NamedTuple):
    """A file of the attempt, as the sender describes it."""

    path: str
    size: int
    sha256: str
    mode: str


def receive(attempt: Attempt, options: argparse.Namespace) -> dict[str, Any]:
    """Receive contents. Once none is missing, create the attempt's files and check them."""
    stream = Incoming(sys.stdin.buffer)
    files, origins = parse_file_list(stream.line(), options)
    sizes = {file.sha256: file.size for file in files}
    refuse_if_started(attempt)
    store = Store(attempt.run.parent / "store.sha256", options.share)
    try:
        store.make_room(sizes)
        held = receive_contents(stream, sizes, store)
        download(origins, sizes, store, held)
        if store.missing(sizes, held):  # contents in memory are lost with this call
            return {"missing": store.missing(sizes, {}), "busy": not store.lock()}
    finally:
        store.unlock()
    with attempt.lock():
        refuse_if_started(attempt)
        if not assemble(attempt, files, store, held):
            return {"missing": store.missing(sizes, {}), "busy": False}
    store.shrink()
    store.unlock()
    return {"received": options.tree}


def refuse_if_started(attempt: Attempt) -> None:
    if attempt.claimed_epochs()[-1:] >= [attempt.epoch]:
        raise RefusedError("this attempt or a newer one has started on this machine")


def parse_file_list(line: bytes, options: argparse.Namespace) -> tuple[list[File], dict[str, str]]:
    """Parse and check the list of files: plain relative paths, each once, within the announced size.

    Also returns the URLs of contents.
    """
    try:
        document = json.loads(line)
        entries, origins = document["files"], document["origins"]
        files = sorted(File(str(path), int(size), str(sha), str(mode)) for path, size, sha, mode in entries)
        origins = {str(sha256): str(url) for sha256, url in origins.items()}
        digest = entries_digest(files)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise RefusedError("the list of files arrived damaged", "damaged") from None
    if digest != options.tree:
        raise RefusedError("the list of files differs from the one that was sent", "damaged")
    for file in files:
        parts = file.path.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise RefusedError(f"{file.path!r} is outside the attempt", "damaged")
        if not re.fullmatch("[0-9a-f]{64}", file.sha256) or not re.fullmatch("[0-7]{4}", file.mode):
            raise RefusedError(f"{file.path!r} is not a plain file", "damaged")
    sizes = {file.sha256: file.size for file in files}
    if any(file.size < 0 or file.size != sizes[file.sha256] for file in files):
        raise RefusedError("the list of files has two sizes for one content", "damaged")
    if sum(file.size for file in files) > options.bytes or len({file.path for file in files}) < len(files):
        raise RefusedError("the list of files is larger than announced", "damaged")
    return files, origins


def entries_digest(files: list[File]) -> str:
    """Return the SHA-256 over path, size, content and mode of every file, as the sender computes it."""
    text = json.dumps(
        [file._asdict() for file in files], sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    return hashlib.sha256(text.encode()).hexdigest()


class Incoming:
    """Reads stdin. Raises after `STALL_TIMEOUT_S` seconds without a byte, so that locks are released."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream

    def line(self) -> bytes:
        """Return the next line; b"" if the connection broke within it."""
        with stall_timer():
            line = self.stream.readline(MAX_LINE_BYTES)
        return line if line.endswith(b"\n") else b""

    def pieces(self, length: int) -> Iterator[bytes]:
        """Yield the next `length` bytes in pieces; fewer if the connection broke."""
        while length > 0:
            with stall_timer():
                piece = self.stream.read1(min(BLOCK, length))  # type: ignore[attr-defined]
            if not piece:
                return
            length -= len(piece)
            yield piece


@contextlib.contextmanager
def stall_timer() -> Iterator[None]:
    signal.signal(signal.SIGALRM, raise_stalled)
    signal.alarm(STALL_TIMEOUT_S)
    yield
    signal.alarm(0)


def raise_stalled(number: int, frame: Any) -> None:
    raise RefusedError(f"no data for {STALL_TIMEOUT_S} s", "stalled")


def receive_contents(stream: Incoming, sizes: dict[str, int], store: Store) -> dict[str, bytes]:
    """Receive contents until there are no more, or another call is sending; return the small ones."""
    held: dict[str, bytes] = {}
    while line := stream.line():
        try:
            sha256, offset, length = json.loads(line)
            fits = type(offset) is type(length) is int and 0 <= offset <= offset + length <= sizes[sha256]
        except (ValueError, TypeError, KeyError):
            fits = False
        if not fits:
            raise RefusedError("a received content is damaged", "damaged")
        if sizes[sha256] <= SMALL_BYTES and sum(map(len, held.values())) + length <= MAX_HELD_BYTES:
            content = b"".join(stream.pieces(length))
            if hashlib.sha256(content).hexdigest() == sha256:
                held[sha256] = content
        elif store.lock():
            store.append(sha256, sizes[sha256], offset, stream.pieces(length))
        else:
            break
    return held


def download(origins: dict[str, str], sizes: dict[str, int], store: Store, held: dict[str, bytes]) -> None:
    """Download missing contents from their public URLs. A content that fails to download stays missing."""
    import http.client
    import urllib.request

    for sha256, offset in store.missing(sizes, held).items():
        if not origins.get(sha256, "").startswith(("https://", "http://")) or not store.lock():
            continue
        request = urllib.request.Request(origins[sha256], headers={"Range": f"bytes={offset}-"})  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=STALL_TIMEOUT_S) as answer:  # noqa: S310
                begin = offset if answer.status == http.client.PARTIAL_CONTENT else 0
                store.append(sha256, sizes[sha256], begin, read_pieces(answer, sizes[sha256] - begin))
        except (OSError, ValueError, http.client.HTTPException) as error:
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise
        if store.entry(sha256).exists():
            store.verify(sha256)  # deletes a wrong content, which is then sent


def read_pieces(answer: Any, length: int) -> Iterator[bytes]:
    """Yield at most `length` bytes of an HTTP answer, in pieces."""
    while length > 0:
        piece = answer.read(min(BLOCK, length))
        if not piece:
            return
        length -= len(piece)
        yield piece


def assemble(attempt: Attempt, files: list[File], store: Store, held: dict[str, bytes]) -> bool:
    """Build the attempt's directory under a temporary name and rename it; False if a content is damaged."""
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
    """Write every file, from memory or from the store; False if a content in the store is damaged."""
    sizes = {file.sha256: file.size for file in files if file.sha256 not in held}
    stays_in_store = store.has_room_for(sizes)
    if not stays_in_store and [sha256 for sha256 in sizes if not store.verify(sha256)]:
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
        elif not stays_in_store:
            store.entry(file.sha256).rename(path)
        elif not store.copy_verified(file.sha256, path):
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
