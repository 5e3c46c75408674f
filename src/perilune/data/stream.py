"""Read records line by line; a broken line is returned with the reason and does not end the reading."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perilune.data.records import TraceRecord, parse_record, records_file
from perilune.errors import RequestError
from perilune.files import open_regular

MAX_LINE_BYTES = 16 << 20
"""Bytes. A longer line counts as broken, so that one line cannot fill the memory."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file of records.

    Attributes:
        file, number: its position; numbers start at 1.
        raw: its bytes without the line end; the first 200 bytes of a line that is too long.
        record: None for a broken line.
        problem: why the line is broken; empty otherwise.
    """

    file: Path
    number: int
    raw: bytes
    record: TraceRecord | None
    problem: str = ""


def stream_lines(path: Path) -> Iterator[Line]:
    """The lines of a file of records, or of a folder's records.jsonl, without blank lines; in bounded memory.

    Raises:
        RequestError: when the file cannot be read.
    """
    file = records_file(path)
    for number, raw, problem in stream_bytes(file):
        yield Line(file, number, raw, None, problem) if problem else _parse_line(file, number, raw)


def stream_bytes(file: Path) -> Iterator[tuple[int, bytes, str]]:
    """Number, bytes and problem of each line that is not blank. A line that is too long has a problem.

    Raises:
        RequestError: when the file cannot be read.
    """
    try:
        with open_regular(file) as lines:
            number = 0
            while raw := lines.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(raw) > MAX_LINE_BYTES:
                    start = raw[:200]
                    while raw and not raw.endswith(b"\n"):
                        raw = lines.readline(MAX_LINE_BYTES)
                    yield number, start, f"longer than {MAX_LINE_BYTES:,} bytes"
                elif raw.strip():
                    yield number, raw.rstrip(b"\r\n"), ""
    except OSError as error:
        raise RequestError(f"cannot read records: {error.strerror}", where=str(file)) from None


def _parse_line(file: Path, number: int, raw: bytes) -> Line:
    try:
        return Line(file, number, raw, parse_record(raw, f"{file}:{number}"))
    except RequestError as error:
        return Line(file, number, raw, None, error.what)
    except RecursionError:
        return Line(file, number, raw, None, "nested too deeply")
