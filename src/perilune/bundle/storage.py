"""Putting files down whole: directories built beside their destination, copies that share nothing."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perilune.errors import RequestError
from perilune.files import fsync_directory

READ_ONLY = 0o444
SHARE_FROM = 16 << 20  # bytes; smaller files are copied, larger read-only ones may share an inode

_REMEDIES = {
    errno.ENOSPC: ("the disk is full", "free some space, or choose another disk with PERILUNE_HOME"),
    errno.EDQUOT: ("the disk quota is used up", "free some space, or choose another disk with PERILUNE_HOME"),
    errno.EFBIG: ("a file grew past the size limit of this process", "raise `ulimit -f`"),
    errno.EACCES: ("no permission", "check the owner and mode, or choose another folder with PERILUNE_HOME"),
    errno.EPERM: ("not permitted", "check the owner and mode, or choose another folder with PERILUNE_HOME"),
    errno.EROFS: ("the file system is read-only", "choose another folder with PERILUNE_HOME"),
    errno.ENOENT: ("no such file", "check the path"),
    errno.ENOTDIR: ("not a directory", "check the path"),
    errno.EISDIR: ("a directory where a file belongs", "check the path"),
    errno.ENAMETOOLONG: ("the name is too long", "choose a shorter one"),
}

# What copy_file_range says on file systems that do not offer it.
_NOT_HERE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ETXTBSY}


@contextmanager
def storage_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` inside the block into a `RequestError` that says what to do about it."""
    try:
        yield
    except OSError as error:
        unknown = (error.strerror or str(error), "check the disk")
        reason, remedy = _REMEDIES.get(error.errno or 0, unknown)
        where = error.filename if isinstance(error.filename, str) else str(path)
        raise RequestError(f"cannot {doing}: {reason}", where=where, remedy=remedy) from error


@contextmanager
def built_beside(destination: Path) -> Iterator[Path]:
    """Give a new directory next to `destination`; whatever is left of it when the block ends is removed.

    The block renames it into place when it is whole, so a reader never sees half of it.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    building = destination.parent / f".{destination.name}.{secrets.token_hex(4)}.tmp"
    building.mkdir()
    try:
        yield building
    finally:
        if building.exists():
            remove_tree(building)


@contextmanager
def new_folder(doing: str, destination: Path) -> Iterator[Path]:
    """Give a folder to fill, which becomes `destination` when the block ends: whole or not at all.

    Raises:
        RequestError: when something is at `destination`, or it cannot be written to.
    """
    with storage_errors(doing, destination), built_beside(destination) as building:
        yield building
        try:
            publish(building, destination)
        except FileExistsError:
            raise RequestError(
                "something is already here", where=str(destination), remedy="choose another folder"
            ) from None


def publish(building: Path, destination: Path) -> None:
    """Make a finished directory durable and give it its name.

    Raises:
        FileExistsError: when something is already there.
    """
    for directory, _, files in os.walk(building, topdown=False):
        for name in files:
            with (Path(directory) / name).open("rb") as file:
                os.fsync(file.fileno())
        fsync_directory(Path(directory))
    try:
        building.rename(destination)
    except OSError as error:
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            raise FileExistsError(errno.EEXIST, "something is already there", str(destination)) from None
        raise
    fsync_directory(destination.parent)


def remove_tree(path: Path) -> None:
    """Delete a directory tree, read-only files included."""
    shutil.rmtree(path, ignore_errors=False)


def make_read_only(path: Path) -> None:
    """Take write permission from a finished output, a file or a folder: `place` then shares large files."""
    for file in (path, *path.rglob("*")):
        if file.is_file() and not file.is_symlink():
            file.chmod(READ_ONLY)


def place(source: Path, target: Path, mode: int, *, link: bool = False) -> None:
    """Put the contents of `source` at `target` with permission bits `mode`.

    A later edit of `source` must not reach `target`: the bytes are copied (copy-on-write where the file
    system offers it). With `link`, a large file that nobody may write, with the very same mode, shares its
    inode: for files of ours, never for those of a user.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    status = source.stat()
    if link and status.st_size >= SHARE_FROM and stat.S_IMODE(status.st_mode) == mode and not mode & 0o222:
        try:
            os.link(source, target)
        except OSError:  # another file system, or links are not allowed: copying is always right
            pass
        else:
            return
    with source.open("rb") as reader, target.open("xb") as writer:
        done = _copy_in_kernel(reader.fileno(), writer.fileno(), status.st_size)
        reader.seek(done)
        writer.seek(done)
        shutil.copyfileobj(reader, writer, 1 << 20)  # what the kernel did not copy
    target.chmod(mode)


def _copy_in_kernel(reader: int, writer: int, size: int) -> int:
    """Copy up to `size` bytes inside the kernel, which shares blocks where it can; returns how many."""
    done = 0
    while done < size and hasattr(os, "copy_file_range"):
        try:
            copied = os.copy_file_range(reader, writer, size - done)
        except OSError as error:
            if error.errno in _NOT_HERE:
                break
            raise
        if copied == 0:
            break
        done += copied
    return done
