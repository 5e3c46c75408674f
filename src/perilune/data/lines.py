"""Read the lines of JSON Lines files in bounded memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from perilune.errors import RequestError
from perilune.files import BOM, detect_wrong_format, open_regular

MAX_LINE_BYTES = 16 << 20
"""Bytes. A longer line counts as broken, so that one line cannot fill the memory."""

HEAD_BYTES = 4096  # bytes that tell the format of a file
MAX_EXCERPT_BYTES = 2000  # bytes of a rejected line in the file of rejected lines


class RawLine(NamedTuple):
    """One line.

    Attributes:
        number: starts at 1.
        offset: bytes of the file before the line.
        raw: its bytes without line end and byte order mark; the first 200 bytes of a line that is too long.
        problem: "longer than N bytes", or empty.
    """

    number: int
    offset: int
    raw: bytes
    problem: str


def read_lines(file: Path) -> Iterator[RawLine]:
    """Yield the lines that are not blank.

    Raises:
        RequestError: when the file cannot be read, or has another format.
    """
    try:
        with open_regular(file) as lines:
            _check_format(file, lines.read(HEAD_BYTES))
            lines.seek(0)
            number = offset = 0
            while raw := lines.readline(MAX_LINE_BYTES + 1):
                number, begin, offset = number + 1, offset, offset + len(raw)
                if len(raw) > MAX_LINE_BYTES:
                    start = raw[:200]
                    while raw and not raw.endswith(b"\n"):
                        raw = lines.readline(MAX_LINE_BYTES)
                    offset = lines.tell()
                    yield RawLine(number, begin, start, f"longer than {MAX_LINE_BYTES:,} bytes")
                elif (raw := raw.removeprefix(BOM)).strip():
                    yield RawLine(number, begin, raw.rstrip(b"\r\n"), "")
    except OSError as error:
        raise RequestError(f"cannot be read: {error.strerror}", where=str(file)) from None


def excerpt(raw: bytes) -> str:
    """Return the beginning of a line as text, for the file of rejected lines."""
    return raw[:MAX_EXCERPT_BYTES].decode(errors="replace")


def check_file(file: Path) -> None:
    """Check that a file can be read and may be JSON Lines.

    Raises:
        RequestError: naming the problem or the other format.
    """
    for _ in read_lines(file):
        return


def _check_format(file: Path, starts: bytes) -> None:
    """Refuse a file of another format as a whole, since each of its lines is invalid."""
    if problem := detect_wrong_format(starts):
        raise RequestError(problem[0], where=str(file), remedy=problem[1])
    formats = (
        (starts.startswith(b"PAR1"), "parquet", "a Parquet file"),
        (starts.removeprefix(BOM).lstrip().startswith(b"["), "json", "a JSON list"),
        (file.suffix in (".csv", ".tsv"), "csv", "a CSV file"),
    )
    for is_format, kind, name in formats:
        if is_format:
            remedy = f"pandas.read_{kind}({file.name!r}).to_json('rows.jsonl', orient='records', lines=True)"
            raise RequestError(f"is {name}, not JSON Lines", where=str(file), remedy=f"convert it: {remedy}")
