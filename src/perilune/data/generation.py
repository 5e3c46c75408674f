"""Generate a folder of records chunk by chunk. A killed generation resumes and ends with the same bytes.

Records go to records.jsonl.partial and rejected rows to rejected.jsonl.partial. After each chunk,
progress.json records how many bytes of both are complete. At the end the files get their names, and
generate.json is written.
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

from perilune.data.generators.collection import MAX_REJECTED_PER_RECORD
from perilune.data.generators.teacher import Rejected
from perilune.data.record_index import RecordIndex
from perilune.data.records import Provenance, TraceRecord, settings_digest, to_row
from perilune.data.stream import stream_lines
from perilune.environments.core.protocol import Task
from perilune.errors import RequestError
from perilune.files import canonical_json, fsync_directory, read_json, sha256_file, write_json

CHUNK_TASKS = 256  # most tasks between two points to resume from
MIN_CHUNK_TASKS = 16  # so that a model still samples many answers at once
RECORDS_FILE, REJECTED_FILE = "records.jsonl", "rejected.jsonl"
PROGRESS_FILE, REPORT_FILE = "progress.json", "generate.json"

OnProgress = Callable[[int, int], None]


class Generator(Protocol):
    """Makes records from tasks.

    Attributes:
        provenance: written to every record.
    """

    provenance: Provenance

    def rows(self, tasks: Sequence[Task], first: int) -> Iterator[TraceRecord | Rejected]:
        """Records and rejected candidates of the tasks; `first` is the index of the first task.

        The rows depend only on the tasks and their indices, not on earlier calls.
        """


@dataclass(frozen=True, slots=True)
class GenerationTarget:
    """The number of records to generate, and the tasks to use.

    Attributes:
        tasks: number of tasks to use; None uses as many as needed, and gives up after
            `MAX_REJECTED_PER_RECORD` rejected candidates per record.
    """

    records: int
    tasks: int | None
    seed: int
    split: str = "train"


@dataclass(slots=True)
class _Progress:
    """Progress of a folder: settings, tasks used, complete bytes, rows by source, rejections by reason."""

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
    def rejected(self) -> int:
        return sum(self.reasons.values())


def generate_records(
    generator: Generator,
    tasks: Iterable[Task],
    target: GenerationTarget,
    out: Path,
    show: OnProgress = lambda kept, rejected: None,
) -> dict[str, Any]:
    """Generate records of `tasks` into the folder `out`, or resume an interrupted generation.

    Duplicate conversations are rejected, unless a mixed policy made them.

    Args:
        show: called after each chunk with the number of kept and of rejected records.

    Returns:
        The content of generate.json: counts, sources, reasons, provenance, and the SHA-256 of the records.

    Raises:
        RequestError: when `out` already has generated records, or was started with other settings.
    """
    digest = settings_digest(by=asdict(generator.provenance), wanted=asdict(target))
    with TemporaryDirectory() as folder, RecordIndex(Path(folder) / "seen.sqlite") as index:
        work = _OutputFolder.open(out, digest, index)
        remaining = islice(tasks, work.progress.tasks, target.tasks)
        while not work.progress.complete:
            missing = target.records - work.progress.rows
            size = min(CHUNK_TASKS, max(MIN_CHUNK_TASKS, missing))
            chunk = list(islice(remaining, size))
            rows = generator.rows(chunk, work.progress.tasks)
            work.add(rows, len(chunk), target, exhausted=len(chunk) < size)
            show(work.progress.rows, work.progress.rejected)
    return work.finish(generator.provenance)


@dataclass(frozen=True, slots=True)
class _OutputFolder:
    """A folder in progress, and the index of its records."""

    out: Path
    progress: _Progress
    index: RecordIndex

    @classmethod
    def open(cls, out: Path, asked: str, index: RecordIndex) -> _OutputFolder:
        """Start a folder, or return to the end of its last complete chunk."""
        if (out / REPORT_FILE).exists():
            raise RequestError(
                "the folder already has generated records", where=str(out), remedy="choose another folder"
            )
        if not (out / PROGRESS_FILE).exists():
            out.mkdir(parents=True, exist_ok=True)
            for name in (RECORDS_FILE, REJECTED_FILE):
                _partial_path(out / name).write_bytes(b"")
            write_json(out / PROGRESS_FILE, asdict(_Progress(asked)))
        progress = _Progress(**read_json(out / PROGRESS_FILE))
        if progress.asked != asked:
            what = "the folder was started with other settings"
            raise RequestError(what, where=str(out), remedy="use the same settings, or choose another folder")
        for name, size in ((RECORDS_FILE, progress.record_bytes), (REJECTED_FILE, progress.rejected_bytes)):
            if _partial_path(out / name).exists():  # False if the file already has its final name
                os.truncate(_partial_path(out / name), size)
        for line in stream_lines(_partial_path(out / RECORDS_FILE)) if not progress.complete else ():
            if line.record is None:
                raise RequestError(line.problem, where=f"{line.file}:{line.number}")
            index.find_or_add(bytes.fromhex(line.record.digest), line.number)
        return cls(out, progress, index)

    def add(
        self,
        rows: Iterable[TraceRecord | Rejected],
        tasks: int,
        target: GenerationTarget,
        *,
        exhausted: bool,
    ) -> None:
        """Write the rows of a chunk, and then the progress."""
        accepted: list[bytes] = []
        rejected: list[bytes] = []
        progress = self.progress
        sources, reasons = Counter(progress.sources), Counter(progress.reasons)
        for row in rows:
            if isinstance(row, TraceRecord) and (
                row.is_mixed or self.index.find_or_add(bytes.fromhex(row.digest), 0) is None
            ):
                accepted.append(canonical_json(to_row(row)))
                sources[row.source] += 1
            else:
                rejection = _rejected_row(row)
                rejected.append(canonical_json(rejection))
                reasons[rejection["reason"]] += 1
            if sources.total() == target.records:
                break
        progress.record_bytes += _append_lines(_partial_path(self.out / RECORDS_FILE), accepted)
        progress.rejected_bytes += _append_lines(_partial_path(self.out / REJECTED_FILE), rejected)
        progress.sources, progress.reasons = dict(sources), dict(reasons)
        progress.tasks += tasks
        hopeless = target.tasks is None and progress.rejected > MAX_REJECTED_PER_RECORD * target.records
        progress.complete = progress.rows == target.records or exhausted or hopeless
        write_json(self.out / PROGRESS_FILE, asdict(progress))

    def finish(self, provenance: Provenance) -> dict[str, Any]:
        """Rename the files, write generate.json, and return its content."""
        for name in (REJECTED_FILE, RECORDS_FILE):
            if _partial_path(self.out / name).exists():
                _partial_path(self.out / name).replace(self.out / name)
        progress = self.progress
        report = {
            "tasks": progress.tasks,
            "rows": progress.rows,
            "rejected": progress.rejected,
            "sources": dict(sorted(progress.sources.items())),
            "reasons": dict(sorted(progress.reasons.items())),
            "provenance": asdict(provenance),
            "sha256": sha256_file(self.out / RECORDS_FILE),
        }
        write_json(self.out / REPORT_FILE, report)
        (self.out / PROGRESS_FILE).unlink()
        fsync_directory(self.out)
        return report


def _rejected_row(row: TraceRecord | Rejected) -> dict[str, str]:
    if isinstance(row, TraceRecord):
        return {"task_id": row.task_id, "source": row.source, "text": row.answer, "reason": "duplicate"}
    return row.as_row()


def _partial_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _append_lines(path: Path, lines: Sequence[bytes]) -> int:
    """Append lines durably; return the number of bytes."""
    written = b"".join(line + b"\n" for line in lines)
    with path.open("ab") as file:
        file.write(written)
        file.flush()
        os.fsync(file.fileno())
    return len(written)
