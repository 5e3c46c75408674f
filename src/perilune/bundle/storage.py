"""Atomic directories and independent copies of files."""

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
LINK_BYTES = 16 << 20  # bytes from which a read-only file is hard-linked instead of copied

_FREE_SPACE = "free some space (`perilune gc`), or choose another disk with PERILUNE_HOME"
_REMEDIES = {
    errno.ENOSPC: ("the disk is full", _FREE_SPACE),
    errno.EDQUOT: ("the disk quota is used up", _FREE_SPACE),
    errno.EFBIG: ("a file grew past the size limit of this process", "raise `ulimit -f`"),
    errno.EACCES: ("no permission", "check the owner and mode, or choose another folder with PERILUNE_HOME"),
    errno.EPERM: ("not permitted", "check the owner and mode, or choose another folder with PERILUNE_HOME"),
    errno.EROFS: ("the file system is read-only", "choose another folder with PERILUNE_HOME"),
    errno.ENOENT: ("no such file", "check the path"),
    errno.ENOTDIR: ("not a directory", "check the path"),
    errno.EISDIR: ("a directory where a file belongs", "check the path"),
    errno.EEXIST: ("it exists already", "choose another path"),
    errno.ELOOP: ("a symbolic link that leads to itself", "check the path"),
    errno.ENAMETOOLONG: ("the name is too long", "choose a shorter one"),
}

# Errors of copy_file_range on file systems without it.
_UNSUPPORTED = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ETXTBSY}


@contextmanager
def storage_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` in the block into a `RequestError` with a remedy."""
    try:
        yield
    except OSError as error:
        unknown = (error.strerror or str(error), "check the disk")
        reason, remedy = _REMEDIES.get(error.errno or 0, unknown)
        name = error.filename2 or error.filename  # of a rename, the target
        where = name if isinstance(name, str) else str(path)
        raise RequestError(f"cannot {action}: {reason}", where=where, remedy=remedy) from error


@contextmanager
def build_directory(destination: Path) -> Iterator[Path]:
    """Yield a new directory next to `destination`, which is deleted when the block ends.

    The block renames the complete directory to `destination`, so readers never see an incomplete one.
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
def new_folder(action: str, destination: Path) -> Iterator[Path]:
    """Yield a folder to fill, which is renamed to `destination` when the block succeeds.

    Raises:
        RequestError: when `destination` exists or cannot be written.
    """
    with storage_errors(action, destination), build_directory(destination) as building:
        yield building
        try:
            publish(building, destination)
        except FileExistsError:
            raise RequestError(
                "the folder exists already", where=str(destination), remedy="choose another folder"
            ) from None


def publish(building: Path, destination: Path) -> None:
    """Sync a complete directory to disk and rename it to `destination`.

    Raises:
        FileExistsError: when `destination` exists.
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
            raise FileExistsError(errno.EEXIST, "the destination exists", str(destination)) from None
        raise
    fsync_directory(destination.parent)


def remove_tree(path: Path) -> None:
    """Delete a directory tree, read-only files included."""
    shutil.rmtree(path, ignore_errors=False)


def make_read_only(path: Path) -> None:
    """Make a file or all files in a folder read-only, so that `copy_file` can hard-link large files."""
    for file in (path, *path.rglob("*")):
        if file.is_file() and not file.is_symlink():
            file.chmod(READ_ONLY)


def copy_file(source: Path, target: Path, mode: int, *, link: bool = False) -> None:
    """Copy `source` to `target` with permission bits `mode`.

    A later change of `source` must not affect `target`, so the bytes are copied (copy-on-write if the file
    system supports it). With `link`, a large read-only file with the same mode is hard-linked. Use it for
    Perilune's own files only, because users may edit theirs.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    status = source.stat()
    if link and status.st_size >= LINK_BYTES and stat.S_IMODE(status.st_mode) == mode and not mode & 0o222:
        try:
            os.link(source, target)
        except OSError:  # another file system, or links are not allowed: copy instead
            pass
        else:
            return
    with source.open("rb") as reader, target.open("xb") as writer:
        copied = _copy_in_kernel(reader.fileno(), writer.fileno(), status.st_size)
        reader.seek(copied)
        writer.seek(copied)
        shutil.copyfileobj(reader, writer, 1 << 20)  # the bytes that the kernel did not copy
    target.chmod(mode)


def _copy_in_kernel(reader: int, writer: int, size: int) -> int:
    """Copy up to `size` bytes in the kernel, which may share blocks; return the number of copied bytes."""
    total = 0
    while total < size and hasattr(os, "copy_file_range"):
        try:
            copied = os.copy_file_range(reader, writer, size - total)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                break
            raise
        if copied == 0:
            break
        total += copied
    return total
