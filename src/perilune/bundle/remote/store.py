"""The store of uploaded file contents on a machine, by digest: no content is sent twice, and uploads resume.

Standard library only, Python 3.8 or newer, Linux; sent with the receiver, which fills it. The store is the
folder WORKSPACE/store.sha256; an incomplete content has ".partial" after its digest. Every read verifies the
content, because a task could have changed it. For the same reason a content is never linked into an attempt:
it is copied (sharing blocks if the file system can) and hashed. A wrong content is deleted and sent again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from perilune.bundle.remote.runner import BLOCK, RefusedError

SMALL_BYTES = 1 << 12  # sending a content up to this size again is faster than asking for it
MAX_UNUSED_S = 30 * 86400.0  # seconds after which an unused content is deleted
FICLONE = 0x40049409  # of ioctl_ficlone(2)


class Store:
    """File contents by digest. One call at a time may add to it; all calls may read.

    Args:
        share: share of the disk that the store may use.
    """

    def __init__(self, folder: Path, share: float) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        disk = os.statvfs(str(folder))
        self.max_bytes = int(share * disk.f_blocks * disk.f_frsize)
        self.lock_file: BinaryIO | None = None

    def lock(self) -> bool:
        """Try to become the call that adds. The kernel frees the lock of a call that died."""
        if self.lock_file is None:
            file = (self.folder / "lock").open("wb")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                return False
            self.lock_file = file
        return True

    def unlock(self) -> None:
        if self.lock_file is not None:
            self.lock_file.close()
            self.lock_file = None

    def entry(self, sha256: str) -> Path:
        return self.folder / sha256

    def partial(self, sha256: str) -> Path:
        return self.folder / f"{sha256}.partial"

    def missing(self, sizes: dict[str, int], held: dict[str, bytes]) -> dict[str, int]:
        """Return the contents that are neither in the store nor in `held`, with the bytes received so far."""
        return {
            sha256: max(0, min(size, plain_size(self.partial(sha256))))
            for sha256, size in sizes.items()
            if sha256 not in held and plain_size(self.entry(sha256)) != size
        }

    def append(self, sha256: str, size: int, offset: int, pieces: Iterator[bytes]) -> None:
        """Append to a content at `offset`; a complete content gets its final name."""
        partial = self.partial(sha256)
        if offset == 0:
            discard(partial)
        try:
            with open_plain(partial, os.O_RDWR | os.O_CREAT) as file:
                if os.fstat(file.fileno()).st_size < offset:
                    raise RefusedError("a received content does not continue the stored part", "damaged")
                file.seek(offset)
                file.truncate()
                for piece in pieces:
                    file.write(piece)
                complete = file.tell() == size
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                discard(partial)
            raise
        if complete:
            partial.rename(self.entry(sha256))

    def verify(self, sha256: str) -> bool:
        """Return whether an entry has the digest in its name; a wrong entry is deleted."""
        return self.copy_verified(sha256, None)

    def copy_verified(self, sha256: str, target: Path | None) -> bool:
        """Copy an entry to `target`; False, and the entry is deleted, if its digest is wrong."""
        try:
            with open_plain(self.entry(sha256), os.O_RDONLY) as source:
                if (compute_digest(source) if target is None else copy(source, target)) == sha256:
                    os.utime(str(self.entry(sha256)))
                    return True
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
                raise
        discard(self.entry(sha256))
        return False

    def make_room(self, sizes: dict[str, int]) -> None:
        """Delete contents that this attempt does not need, the oldest first, until its own contents fit."""
        needed = sum(sizes[sha256] - received for sha256, received in self.missing(sizes, {}).items())
        for path, _ in self.list_oldest_first():
            if self.free_bytes() >= needed:
                break
            if path.name.partition(".")[0] not in sizes:
                self.delete(path)
        if self.free_bytes() < needed:
            raise RefusedError(
                f"its disk is full: {needed:,} bytes are needed, {self.free_bytes():,} are free", "disk_full"
            )

    def has_room_for(self, sizes: dict[str, int]) -> bool:
        """Return whether the contents of an attempt may stay in the store and be copied, instead of moved."""
        needed = sum(sizes.values())
        return needed <= self.max_bytes and needed <= self.free_bytes()

    def shrink(self) -> None:
        """Delete contents that were not used for long, and the oldest ones beyond the store's share."""
        contents = self.list_oldest_first()
        total = sum(status.st_size for _, status in contents)
        for path, status in contents:
            if total > self.max_bytes or time.time() - status.st_mtime > MAX_UNUSED_S:
                self.delete(path)
                total -= status.st_size

    def delete(self, path: Path) -> None:
        """Delete a content, unless another call may be receiving it."""
        if not path.suffix or self.lock():
            discard(path)

    def list_oldest_first(self) -> list[tuple[Path, os.stat_result]]:
        """Return all contents, sorted by the time of their last use."""
        contents = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.name != "lock":
                    contents.append((path, path.lstat()))
        return sorted(contents, key=lambda entry: entry[1].st_mtime)

    def free_bytes(self) -> int:
        disk = os.statvfs(str(self.folder))
        # Some file systems report nothing.
        return disk.f_bavail * disk.f_frsize if disk.f_blocks else sys.maxsize


def copy(source: BinaryIO, path: Path) -> str:
    """Copy to a new file, sharing blocks if the file system can; return the SHA-256 of the copy."""
    digest = hashlib.sha256()
    with path.open("xb+") as target:
        try:
            fcntl.ioctl(target.fileno(), FICLONE, source.fileno())
        except OSError:
            for block in iter(lambda: source.read(BLOCK), b""):
                digest.update(block)
                target.write(block)
            sha256 = digest.hexdigest()
        else:
            sha256 = compute_digest(target)
        target.flush()
        os.fsync(target.fileno())
    return sha256


def compute_digest(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    for block in iter(lambda: file.read(BLOCK), b""):
        digest.update(block)
    return digest.hexdigest()


def open_plain(path: Path, flags: int) -> BinaryIO:
    """Open a regular file; raises OSError for a link or anything else."""
    descriptor = os.open(str(path), flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENXIO, "not a plain file", str(path))
    return os.fdopen(descriptor, "r+b" if flags & os.O_RDWR else "rb")


def plain_size(path: Path) -> int:
    """Return the size of a regular file in bytes; -1 if there is none."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            return status.st_size
    return -1


def discard(path: Path) -> None:
    """Remove the file, link or folder at a path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(str(path), ignore_errors=True)
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        path.unlink()
