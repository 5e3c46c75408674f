"""Read records line by line; a broken line is returned with the reason and does not end the reading."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perilune.data.lines import read_lines
from perilune.data.records import TraceRecord, parse_record, records_file
from perilune.errors import RequestError


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
    """Yield the lines of a file of records, or of a folder's records.jsonl, without blank lines.

    Raises:
        RequestError: when the file cannot be read, or is no JSON Lines file.
    """
    file = records_file(path)
    for number, _, raw, problem in read_lines(file):
        yield Line(file, number, raw, None, problem) if problem else _parse_line(file, number, raw)


def _parse_line(file: Path, number: int, raw: bytes) -> Line:
    try:
        return Line(file, number, raw, parse_record(raw, f"{file}:{number}"))
    except RequestError as error:
        remedy = f"; try: {error.remedy}" if error.remedy else ""
        return Line(file, number, raw, None, error.what + remedy)
    except RecursionError:
        return Line(file, number, raw, None, "nested too deeply")
