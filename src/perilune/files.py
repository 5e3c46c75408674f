"""Canonical JSON, digests, atomic writes and append-only lines.

Every function here that writes JSON redacts the values of secrets, see `perilune.redaction`.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import secrets
import stat
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from perilune.errors import RequestError
from perilune.redaction import redact_document

LOCK_POLL_S = 0.05
MAX_FILE_BYTES = 1 << 28  # of a file that is read into memory
BOM = b"\xef\xbb\xbf"  # of UTF-8
LFS_POINTER = b"version https://git-lfs.github.com/"  # the beginning of a file that Git LFS left out
# The first bytes of gzip, zstd, bzip2, xz and zip.
COMPRESSED_MAGIC = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"PK\x03\x04")


def home_directory() -> Path:
    """Return the directory with all state of Perilune: $PERILUNE_HOME or ~/.perilune. Creates nothing."""
    return Path(os.environ.get("PERILUNE_HOME") or "~/.perilune").expanduser().absolute()


def canonical_json(value: Any) -> bytes:
    """Encode `value` as sorted, compact UTF-8 JSON: equal values give equal bytes.

    Raises:
        ValueError: on NaN or infinity, which JSON cannot represent.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def replace_field(section: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy of `section` with `value` at the dotted `key`."""
    first, _, rest = key.partition(".")
    return {**section, first: replace_field(section[first], rest, value) if rest else value}


def get_field(section: Mapping[str, Any], key: str) -> Any:
    """Return the value at the dotted `key` of `section`; None where a part is missing."""
    value: Any = section
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def parse_strict_json(data: bytes) -> Any:
    """Decode untrusted JSON, without the extensions that the standard decoder accepts.

    Raises:
        ValueError: when the data is not UTF-8 or JSON, repeats a key of an object, has a number beyond the
            range of floats or half of a surrogate pair, or is nested too deeply.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_reject_duplicate_keys,
            parse_float=_parse_finite,
            parse_constant=reject_constant,
        )
        if b"\\ud" in data.lower():
            canonical_json(value)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair, which is not a character") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def detect_wrong_format(head: bytes) -> tuple[str, str] | None:
    """Return the problem of a text file that begins with `head`, and its remedy; None if it may be UTF-8."""
    if head.startswith(COMPRESSED_MAGIC):
        return "is compressed", "decompress it, for example with gunzip; save a spreadsheet as CSV"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"
    if head.startswith(LFS_POINTER):
        return "is a Git LFS pointer, not the file itself", "run git lfs pull in the folder"
    return None


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for name, value in pairs:
        if name in document:
            raise ValueError(f"the key {name[:80]!r} occurs twice")
        document[name] = value
    return document


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is beyond the range of numbers")
    return value


def reject_constant(name: str) -> NoReturn:
    """Refuse NaN and infinities, which Python's JSON decoder accepts."""
    raise ValueError(f"{name} is not a JSON number")


def sha256_bytes(data: bytes) -> str:
    """Return the hex SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the hex SHA-256 of the file at `path`, read in bounded memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `path` atomically and durably: readers and crashes see either the old or the new file.

    Raises:
        IsADirectoryError: when the path is a directory.
        FileExistsError: when it is a device, pipe or socket, which the rename would remove.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "not a regular file", str(path))
    payload = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Sync the directory `path`, so that renames and new files in it are durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, *, wait: float = 0.0, shared: bool = False) -> Iterator[bool]:
    """Lock the file `path` with flock. The lock ends with the process.

    Args:
        wait: seconds to wait for other holders; math.inf waits until they release it.
        shared: admit other shared locks.

    Yields:
        Whether that succeeded. It fails if another process holds the lock, or the folder does not exist.

    Raises:
        FileNotFoundError: when the folder does not exist and `wait` is math.inf.
    """
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait == math.inf else fcntl.LOCK_NB)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except FileNotFoundError:
        if wait == math.inf:
            raise
        yield False
        return
    try:
        yield _acquire(descriptor, kind, time.monotonic() + wait)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, kind: int, until: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, kind)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(LOCK_POLL_S)
        else:
            return True


def write_json(path: Path, value: Any) -> None:
    """Atomically write `value` as indented JSON with sorted keys, ended by a newline."""
    redacted = redact_document(value)
    text = json.dumps(redacted, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomic(path, text + "\n")


def is_inside_root(path: str) -> bool:
    """Return whether an untrusted relative path, with "/" between its parts, stays below its root."""
    return not any(part in {"", ".", ".."} or "\0" in part for part in path.split("/"))


def open_inside(root: Path, path: Path) -> BinaryIO:
    """Open the regular file `path` inside the folder `root` for reading, without following symbolic links.

    Raises:
        OSError: when the path is missing, has a link below `root`, or is not a regular file.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for part in path.relative_to(root).parts:
        outer = descriptor
        try:
            descriptor = os.open(part, flags, dir_fd=outer)
        finally:
            os.close(outer)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(descriptor, "rb")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Refuses FIFOs and devices, which could block.

    Raises:
        RequestError: when the path is missing, or is not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        folder = "" if path.parent == Path() else str(path.parent)
        raise RequestError(f"no file {path.name}", where=folder) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RequestError(
            "is not a regular file", where=str(path), remedy="give a file, not a pipe or device"
        )
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
        RequestError: as `open_regular`, and when the file is larger.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise RequestError(f"is larger than {limit:,} bytes", where=str(path))
    return content


def finite_number(value: object) -> float | None:
    """Return `value` as a float; None if it is not a number, not finite, or an integer beyond the floats."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        RequestError: as `read_regular` and `parse_json`.
    """
    return parse_json(read_regular(path), path)


def parse_json(data: bytes, path: Path) -> Any:
    """Return the JSON value in the content of the file `path`.

    Raises:
        RequestError: when it is malformed. The message names file and line.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # also for huge integers and deep nesting
        line = getattr(error, "lineno", 1)
        raise RequestError(f"not valid JSON: {error}", where=f"{path}:{line}") from None


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file is missing or damaged. For data that can be remade."""
    try:
        return dict(read_json(path))
    except (RequestError, OSError, TypeError, ValueError):
        return {}


def extract_archive(archive: tarfile.TarFile, root: Path) -> None:
    """Extract a tar archive below `root`. Refuses devices, and members that lead outside of `root`.

    Raises:
        RequestError: when a member is refused. The message names it.
    """
    if not hasattr(tarfile, "data_filter"):  # before Python 3.11.4
        for member in archive.getmembers():
            for path in filter(None, (member.name, member.linkname)):
                if path.startswith("/") or ".." in path.split("/") or member.isdev():
                    raise RequestError(f"{member.name!r} may lead outside of the archive")
        archive.extractall(root)  # noqa: S202 (checked above)
        return
    try:
        archive.extractall(root, filter="data")
    except tarfile.FilterError as error:
        raise RequestError(f"{error.tarinfo.name!r} leads outside of the archive: {error}") from None


def write_json_lines(path: Path, values: Iterable[Any]) -> None:
    """Atomically write one canonical JSON line for each value."""
    write_atomic(path, b"".join(canonical_json(redact_document(value)) + b"\n" for value in values))


def append_json_line(path: Path, value: Any) -> None:
    """Append one JSON line in a single write, so that lines of several writers do not interleave.

    Raises:
        OSError: when the disk has no room for the whole line.
    """
    line = canonical_json(redact_document(value)) + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        while line:  # a nearly full disk takes a part, and then refuses the rest
            line = line[os.write(descriptor, line) :]
    finally:
        os.close(descriptor)


def read_json_lines(path: Path) -> Iterator[Any]:
    """Yield the values in a JSON Lines file, except for an incomplete last line; nothing without a file.

    Raises:
        RequestError: when a line is malformed. The message names file and line.
    """
    if not path.exists():
        return
    with open_regular(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"not valid JSON: {error}", where=f"{path}:{number}") from None
