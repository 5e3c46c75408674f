"""A folder of records made chunk by chunk: killed at any instant, it goes on and ends with the same bytes.

Rows go to records.jsonl.partial, what is refused to rejected.jsonl.partial, and after each chunk
progress.json says how much of both counts. When all is made they are renamed, and generate.json comes last.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from perilune.data.generators.gathering import MOST_REJECTED
from perilune.data.generators.teacher import Rejected
from perilune.data.records import Provenance, TraceRecord, as_row, settings_digest
from perilune.data.seen import Seen
from perilune.data.stream import stream_lines
from perilune.environments.core.protocol import Task
from perilune.errors import RequestError
from perilune.files import canonical_json, fsync_directory, read_json, sha256_file, write_json

CHUNK = 256  # tasks between two points to go on from
RECORDS, REJECTED, NOTE, REPORT = "records.jsonl", "rejected.jsonl", "progress.json", "generate.json"

OnProgress = Callable[[int, int], None]


class Generator(Protocol):
    """Something that makes records of tasks.

    Attributes:
        provenance: on every row.
    """

    provenance: Provenance

    def rows(self, tasks: Sequence[Task], first: int) -> Iterator[TraceRecord | Rejected]:
        """What it makes of the tasks, kept or refused; `first` is the place of the first one among all tasks.

        The same tasks at the same places give the same rows, whatever was asked before.
        """
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """How much to make.

    Attributes:
        records: at most so many.
        tasks: of so many tasks; None: of as many as it takes, unless far too much is refused.
        seed, split: that the tasks follow from.
    """

    records: int
    tasks: int | None
    seed: int
    split: str = "train"


@dataclass(slots=True)
class _Progress:
    """How far a folder is: tasks asked, bytes that count, rows by source, refusals by reason."""

    asked: str
    tasks: int = 0
    record_bytes: int = 0
    rejected_bytes: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    complete: bool = False

    @property
    def rows(self) -> int:
        return sum(self.sources.values())

    @property
    def refused(self) -> int:
        return sum(self.reasons.values())


def generate(
    generator: Generator,
    tasks: Iterable[Task],
    wanted: Wanted,
    out: Path,
    show: OnProgress = lambda kept, rejected: None,
) -> dict[str, Any]:
    """Make records of `tasks` and write them to the folder `out`, or go on where that was left.

    A conversation that was made before is refused as a duplicate, unless a mixed policy made it.

    Args:
        show: is told after each chunk how many records were kept, and how many were not.

    Returns:
        what generate.json says: counts, sources, reasons, provenance, and the SHA-256 of the records.

    Raises:
        RequestError: when `out` holds generated records already, or was begun with other settings.
    """
    asked = settings_digest(by=asdict(generator.provenance), wanted=asdict(wanted))
    with TemporaryDirectory() as folder, Seen(Path(folder) / "seen.sqlite") as seen:
        work = _Work.open(out, asked, seen)
        coming = islice(tasks, work.progress.tasks, wanted.tasks)
        while not work.progress.complete:
            chunk = list(islice(coming, CHUNK))
            work.add(generator.rows(chunk, work.progress.tasks), len(chunk), wanted)
            show(work.progress.rows, work.progress.refused)
    return work.finish(generator.provenance)


@dataclass(frozen=True, slots=True)
class _Work:
    """A folder under work, and what is in its records so far."""

    out: Path
    progress: _Progress
    seen: Seen

    @classmethod
    def open(cls, out: Path, asked: str, seen: Seen) -> _Work:
        """Begin, or go back to the end of the last whole chunk."""
        if (out / REPORT).exists():
            raise RequestError(
                "the folder holds generated records already", where=str(out), remedy="name another one"
            )
        if not (out / NOTE).exists():
            out.mkdir(parents=True, exist_ok=True)
            for name in (RECORDS, REJECTED):
                _partial(out / name).write_bytes(b"")
            write_json(out / NOTE, asdict(_Progress(asked)))
        progress = _Progress(**read_json(out / NOTE))
        if progress.asked != asked:
            raise RequestError(
                "the folder was begun with other settings",
                where=str(out),
                remedy="ask as before, or name another folder",
            )
        for name, size in ((RECORDS, progress.record_bytes), (REJECTED, progress.rejected_bytes)):
            if _partial(out / name).exists():  # it is not, when it had its last name already
                os.truncate(_partial(out / name), size)
        for line in stream_lines(_partial(out / RECORDS)) if not progress.complete else ():
            if line.record is None:
                raise RequestError(line.problem, where=f"{line.file}:{line.number}")
            seen.same(bytes.fromhex(line.record.digest), line.number)
        return cls(out, progress, seen)

    def add(self, rows: Iterable[TraceRecord | Rejected], tasks: int, wanted: Wanted) -> None:
        """Write the rows of a chunk, and then that they count."""
        made: list[bytes] = []
        refused: list[bytes] = []
        progress = self.progress
        sources, reasons = Counter(progress.sources), Counter(progress.reasons)
        for row in rows:
            if isinstance(row, TraceRecord) and (
                row.is_mixed or self.seen.same(bytes.fromhex(row.digest), 0) is None
            ):
                made.append(canonical_json(as_row(row)))
                sources[row.source] += 1
            else:
                told = _refusal(row)
                refused.append(canonical_json(told))
                reasons[told["reason"]] += 1
            if sources.total() == wanted.records:
                break
        progress.record_bytes += _append(_partial(self.out / RECORDS), made)
        progress.rejected_bytes += _append(_partial(self.out / REJECTED), refused)
        progress.sources, progress.reasons = dict(sources), dict(reasons)
        progress.tasks += tasks
        hopeless = wanted.tasks is None and progress.refused > MOST_REJECTED * wanted.records
        progress.complete = progress.rows == wanted.records or tasks < CHUNK or hopeless
        write_json(self.out / NOTE, asdict(progress))

    def finish(self, provenance: Provenance) -> dict[str, Any]:
        """Give the files their names, and write the report."""
        for name in (REJECTED, RECORDS):
            if _partial(self.out / name).exists():
                _partial(self.out / name).replace(self.out / name)
        progress = self.progress
        report = {
            "tasks": progress.tasks,
            "rows": progress.rows,
            "rejected": progress.refused,
            "sources": dict(sorted(progress.sources.items())),
            "reasons": dict(sorted(progress.reasons.items())),
            "provenance": asdict(provenance),
            "sha256": sha256_file(self.out / RECORDS),
        }
        write_json(self.out / REPORT, report)
        (self.out / NOTE).unlink()
        fsync_directory(self.out)
        return report


def _refusal(row: TraceRecord | Rejected) -> dict[str, str]:
    """What is not kept, as a row; a record that is not was there before."""
    if isinstance(row, TraceRecord):
        return {"task_id": row.task_id, "source": row.source, "text": row.answer, "reason": "duplicate"}
    one = row.candidate
    return {"task_id": one.task.task_id, "source": one.source, "text": one.text, "reason": row.reason}


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _append(path: Path, lines: Sequence[bytes]) -> int:
    """Append lines, durably; returns how many bytes they are."""
    written = b"".join(line + b"\n" for line in lines)
    with path.open("ab") as file:
        file.write(written)
        file.flush()
        os.fsync(file.fileno())
    return len(written)
