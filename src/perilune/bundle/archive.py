"""Packs a bundle into one archive and unpacks it. An archive is untrusted until it has been verified."""

from __future__ import annotations

import errno
import gzip
import io
import os
import shutil
import tarfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from perilune.bundle.digest import source_files
from perilune.bundle.storage import build_directory, publish, storage_errors
from perilune.bundle.verify import require_verified
from perilune.errors import RequestError
from perilune.files import is_inside_root, open_regular

_CHUNK = 1 << 20  # bytes read at a time; a larger header is an attack
_MAX_PATH_CHARS = 1024
_MAX_DEPTH = 64  # of folders; without a limit, a small archive could create millions
_MAX_RATIO = 100  # unpacked bytes for each byte of an archive
_BASE_BYTES = 1 << 28  # unpacked bytes that are allowed in addition


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """Limits on unpacking an archive: number of files, bytes of one file, bytes in total."""

    files: int = 100_000
    file_bytes: int = 1 << 40
    bytes: int = 1 << 41

    def for_archive(self, archive: Path) -> ArchiveLimits:
        """Return the limits for one archive, which depend on its size."""
        return replace(self, bytes=min(self.bytes, _BASE_BYTES + _MAX_RATIO * archive.stat().st_size))


def pack(bundle: Path, archive: Path) -> None:
    """Write the bundle, with its artifacts and runtime files, to `archive` (.tar.gz).

    Equal bundles give equal archives with the same zlib: names are sorted, and owners and times are omitted.

    Raises:
        RequestError: when the bundle is incomplete or changed, `archive` exists, or the disk cannot be
            written.
    """
    require_verified(bundle)
    if archive.exists():
        raise RequestError("the file exists already", where=str(archive), remedy="choose another name")
    with storage_errors("pack the bundle", archive), build_directory(archive) as building:
        temporary = building / archive.name
        with (
            temporary.open("xb") as file,
            gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=file, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for relative, path in source_files(bundle):
                member = tarfile.TarInfo(relative)
                status = path.stat()
                member.size, member.mode = status.st_size, status.st_mode & 0o777
                with path.open("rb") as content:
                    tar.addfile(member, content)
        temporary.rename(archive)


def unpack(
    archive: Path, destination: Path, *, digest: str | None = None, limits: ArchiveLimits | None = None
) -> None:
    """Unpack a bundle to `destination`, which must not exist, and verify it before it is renamed into place.

    Unpacks only plain files below `destination`, each once, within `limits`. Refuses links, devices, absolute
    paths, "..", and a bundle that differs from its own digest or from `digest`.

    Raises:
        RequestError: with the name of the wrong member. Leaves no files behind.
    """
    if not archive.exists():
        raise RequestError("no such file", where=str(archive), remedy="check the path")
    with storage_errors("unpack the bundle", destination), build_directory(destination) as building:
        try:
            bounds = (limits or ArchiveLimits()).for_archive(archive)
            if _checked_size(archive, bounds) > shutil.disk_usage(building).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(building))
            with open_regular(archive) as file, gzip.GzipFile(fileobj=file) as packed:
                _extract(_BoundedStream(packed, bounds), building, bounds)
        except RequestError as error:
            raise RequestError(
                error.what, where=str(archive), remedy="get the archive from a source that you trust"
            ) from None
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
            raise RequestError(
                f"the archive is damaged: {error}", where=str(archive), remedy="fetch it again"
            ) from None
        for directory in ("inputs", "scripts", "runtime", "artifacts"):
            (building / directory).mkdir(exist_ok=True)
        require_verified(building, digest)
        publish(building, destination)


class _BoundedStream(io.RawIOBase):
    """A decompressed stream that raises an error before memory or disk are full."""

    def __init__(self, stream: gzip.GzipFile, limits: ArchiveLimits) -> None:
        self._stream = stream
        self._max_bytes = limits.bytes + limits.files * 4096  # with headers and padding

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0 or size > _CHUNK:
            raise RequestError(f"the archive has a header of more than {_CHUNK >> 20} MiB")
        data = self._stream.read(size)
        self._check_position(self._stream.tell())
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_SET:
            self._check_position(offset)
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def _check_position(self, position: int) -> None:
        if position > self._max_bytes:
            raise RequestError(f"the archive unpacks to more than the limit, {self._max_bytes:,} bytes")


def _extract(stream: _BoundedStream, root: Path, limits: ArchiveLimits) -> None:
    total = 0
    with tarfile.open(fileobj=stream, mode="r:") as tar:
        for number, member in enumerate(tar, start=1):
            total += member.size
            _check_member(member, number, total, limits)
            path = root / _safe_path(member)
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            assert content is not None
            try:
                with path.open("xb") as file:
                    shutil.copyfileobj(content, file)
            except FileExistsError:
                raise RequestError(f"{member.name!r} is in the archive twice") from None
            path.chmod(member.mode & 0o755)
    while stream.read(_CHUNK):  # to the end, where gzip checks its checksum
        pass


def _checked_size(archive: Path, limits: ArchiveLimits) -> int:
    """Check all headers before anything is written, and return the bytes that they declare."""
    with open_regular(archive) as file, gzip.GzipFile(fileobj=file) as packed:
        total = 0
        with tarfile.open(fileobj=_BoundedStream(packed, limits), mode="r:") as tar:
            for number, member in enumerate(tar, start=1):
                total += member.size
                _check_member(member, number, total, limits)
    return total


def _check_member(member: tarfile.TarInfo, number: int, total: int, limits: ArchiveLimits) -> None:
    _safe_path(member)
    if number > limits.files:
        raise RequestError(f"the archive has more than {limits.files} members")
    if member.size < 0 or member.size > limits.file_bytes or total > limits.bytes:
        raise RequestError(f"{member.name!r} exceeds the limit of the archive, {limits.bytes:,} bytes")


def _safe_path(member: tarfile.TarInfo) -> PurePosixPath:
    """Return the relative path of a member, if it is safe to unpack."""
    name = member.name
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE) or member.issparse():
        raise RequestError(f"{name!r} is a link or a special file; a bundle has none")
    too_long = len(name) > _MAX_PATH_CHARS or name.count("/") > _MAX_DEPTH
    if too_long or not name.isprintable() or "\\" in name or not is_inside_root(name):
        raise RequestError(f"{name[:200]!r} is not a plain relative path")
    return PurePosixPath(name)
