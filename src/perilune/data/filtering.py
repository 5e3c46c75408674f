"""Filter records: reject broken, poor, duplicate and contaminated records, with a reason for each.

The first pass checks each line by itself and against earlier lines. The second pass writes the remaining
lines, once the best answers to each task and the best of similar answers are known. Memory does not grow with
the input. A line is identified by its place: the number of its file times `MAX_LINES`, plus its line number.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from pydantic import Field

from perilune.data.lines import check_file, excerpt
from perilune.data.record_index import RecordIndex
from perilune.data.records import TraceRecord, is_validation, records_file
from perilune.data.similarity import Contamination, detect_language, minhash_signature
from perilune.data.stream import Line, stream_lines
from perilune.errors import RequestError
from perilune.files import canonical_json, fsync_directory, sha256_file, write_json
from perilune.frozen import Frozen

REPORT_INTERVAL_LINES = 500
MAX_LINES = 1 << 40  # more than any file has

Progress = Callable[[int, int, Mapping[str, float]], None]


class FilterSettings(Frozen):
    """Conditions that a record must meet."""

    min_score: float | None = Field(None, allow_inf_nan=False, description="lowest score")
    best: int | None = Field(
        1, ge=1, description="records per task, those with the best scores; null keeps all"
    )
    near: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Jaccard similarity from which two texts are duplicates; the better one stays",
    )
    min_characters: int = Field(1, ge=0, description="shortest last answer, in characters")
    max_characters: int | None = Field(None, ge=1, description="longest conversation, in characters")
    languages: tuple[str, ...] = Field((), description="ISO codes of languages to keep; empty keeps all")
    ngram: int = Field(
        13,
        ge=2,
        description="number of consecutive words shared with an evaluation that counts as contamination",
    )
    validation: float = Field(0.0, ge=0, lt=1, description="share of tasks to write to validation.jsonl")


def filter_files(
    inputs: Sequence[Path],
    evaluations: Sequence[Path],
    settings: FilterSettings,
    out: Path,
    on_progress: Progress = lambda done, total, figures: None,
) -> dict[str, Any]:
    """Filter files of records into the folder `out`.

    Writes train.jsonl, rejected.jsonl, filter.json, and validation.jsonl if `settings.validation` is above 0.
    All files get their names when the work is complete.

    Args:
        evaluations: files of records whose prompts and n-grams must not be in the training data.
        on_progress: called with bytes read, bytes of all inputs, and lines read and kept so far.

    Returns:
        The content of filter.json: counts by reason, the inputs' digests and the settings.

    Raises:
        RequestError: when a file cannot be read, an evaluation is broken, `out` already has filtered or
            generated data, or a package for near duplicates or languages is missing.
    """
    inputs, evaluations = list(map(records_file, inputs)), list(map(records_file, evaluations))
    for file in (*inputs, *evaluations):
        check_file(file)
    if out.exists() and not out.is_dir():
        raise RequestError("is a file, not a folder", where=str(out), remedy="choose another folder")
    for report_name, content in (("filter.json", "filtered"), ("generate.json", "generated")):
        if (out / report_name).exists():
            raise RequestError(
                f"the folder already has {content} data", where=str(out), remedy="choose another folder"
            )
    names = ["train.jsonl", "rejected.jsonl"] + (["validation.jsonl"] if settings.validation else [])
    outputs = [(out / name).resolve() for name in names]
    for file in (*inputs, *evaluations):
        if file.resolve() in outputs:
            raise RequestError(
                "would be overwritten", where=str(file), remedy="choose another folder for --out"
            )
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".filter-", dir=out)))
        files = {name: stack.enter_context((work / name).open("wb")) for name in names}
        index = stack.enter_context(RecordIndex(work / "seen.sqlite"))
        judge = _LineFilter(settings, index, _load_contamination(evaluations, settings.ngram), inputs)
        counts = _filter_lines(inputs, judge, work / "left.jsonl", files["rejected.jsonl"], on_progress)
        counts += _write_best(inputs, work / "left.jsonl", index, settings, files)
        for name in names:
            files[name].flush()
            (work / name).replace(out / name)
    report = _make_report(counts, inputs, evaluations, settings)
    write_json(out / "filter.json", report)  # last, because it marks the folder as complete
    fsync_directory(out)
    return report


class _LineFilter:
    """Decides whether to reject a line, with the cheapest checks first."""

    def __init__(
        self,
        settings: FilterSettings,
        index: RecordIndex,
        contamination: Contamination | None,
        inputs: Sequence[Path],
    ) -> None:
        self._settings, self._index, self._contamination = settings, index, contamination
        self._inputs = inputs

    def reason(self, line: Line, place: int) -> tuple[str, str] | None:
        """Return a reason and its details, or None to keep the line, which is then indexed at `place`."""
        record = line.record
        if record is None:
            return "broken", line.problem
        reason = self._check_record(record) or self._check_duplicate(record, place)
        if reason is None:
            task = "\0".join((record.environment, record.task_id, record.agent))
            self._index.add_score(task.encode(), record.score, place)
        return reason

    def _check_record(self, record: TraceRecord) -> tuple[str, str] | None:
        settings = self._settings
        if settings.min_score is not None and record.score < settings.min_score:
            return "score", f"{record.score:g} is below {settings.min_score:g}"
        answer, total = len(record.answer), sum(len(message["content"]) for message in record.messages)
        if answer < settings.min_characters:
            return "too short", f"an answer of {answer} characters"
        if settings.max_characters is not None and total > settings.max_characters:
            return "too long", f"{total} characters"
        if settings.languages and (language := detect_language(record.answer)) not in settings.languages:
            return "language", language
        if self._contamination is None:
            return None
        found = self._contamination.found_in(record.prompt, record.answer)
        return None if found is None else ("contaminated", found)

    def _check_duplicate(self, record: TraceRecord, place: int) -> tuple[str, str] | None:
        if record.is_mixed:
            return None
        earlier = self._index.find_or_add(bytes.fromhex(record.digest), place)
        if earlier is not None:
            return "duplicate", f"of {_locate(self._inputs, earlier)}"
        if self._settings.near is not None:
            signature = minhash_signature(f"{record.prompt}\n{record.answer}")
            similar = self._index.find_similar(signature, self._settings.near)
            if similar and similar[0][2] >= record.score:
                return _near_duplicate(self._inputs, *similar[0][:2])
            for worse, similarity, _ in similar:
                self._index.replace(worse, place, similarity)
            self._index.add_signature(signature, record.score, place)
        return None


def _locate(inputs: Sequence[Path], place: int) -> str:
    """Return FILE:LINE of a place."""
    file, line = divmod(place, MAX_LINES)
    return f"{inputs[file]}:{line}"


def _near_duplicate(inputs: Sequence[Path], place: int, similarity: float) -> tuple[str, str]:
    return "near duplicate", f"of {_locate(inputs, place)}, similarity about {similarity:.2f}"


def _load_contamination(evaluations: Sequence[Path], ngram: int) -> Contamination | None:
    if not evaluations:
        return None
    contamination = Contamination(ngram)
    for path in evaluations:
        for line in stream_lines(path):
            if line.record is None:
                raise RequestError(
                    line.problem, where=f"{line.file}:{line.number}", remedy="correct the evaluation file"
                )
            contamination.add(line.record.prompt, line.record.answer)
    return contamination


def _filter_lines(
    inputs: Sequence[Path], judge: _LineFilter, left: Path, rejected: IO[bytes], on_progress: Progress
) -> Counter[str]:
    """First pass: write each line that is not rejected to `left`, after its place."""
    counts: Counter[str] = Counter()
    done, total = 0, sum(path.stat().st_size for path in inputs)
    lines = ((index, line) for index, path in enumerate(inputs) for line in stream_lines(path))
    with left.open("wb") as file:
        for index, line in lines:
            counts["read"] += 1
            place = index * MAX_LINES + line.number
            done += len(line.raw) + 1
            reason = judge.reason(line, place)
            if reason is None:
                counts["left"] += 1
                file.write(b"%d %s\n" % (place, line.raw))
            else:
                counts[reason[0]] += 1
                rejected.write(_rejected_row(inputs, place, reason, line.raw))
            if counts["read"] % REPORT_INTERVAL_LINES == 1:
                on_progress(done, total, {"lines": counts["read"], "left": counts["left"]})
    del counts["left"]
    return counts


def _write_best(
    inputs: Sequence[Path],
    left: Path,
    index: RecordIndex,
    settings: FilterSettings,
    files: Mapping[str, IO[bytes]],
) -> Counter[str]:
    """Second pass: write the best records of each task to training or validation."""
    counts: Counter[str] = Counter()
    if settings.best is not None:
        index.keep_best(settings.best)
    with left.open("rb") as lines:
        for line in lines:
            number, raw = line.rstrip(b"\n").split(b" ", 1)
            place, reason = int(number), None
            if (replacement := index.find_replacement(place)) is not None:
                reason = _near_duplicate(inputs, *replacement)
            elif settings.best is not None and not index.is_kept(place):
                reason = ("not best", f"{settings.best} of this task kept")
            if reason is not None:
                counts[reason[0]] += 1
                files["rejected.jsonl"].write(_rejected_row(inputs, place, reason, raw))
                continue
            held_out = is_validation(json.loads(raw)["task_id"], settings.validation)
            counts["validation" if held_out else "train"] += 1
            files["validation.jsonl" if held_out else "train.jsonl"].write(raw + b"\n")
    return counts


def _rejected_row(inputs: Sequence[Path], place: int, reason: tuple[str, str], raw: bytes) -> bytes:
    (file, line), (kind, detail) = divmod(place, MAX_LINES), reason
    row = {"file": str(inputs[file]), "line": line, "reason": kind, "detail": detail, "row": excerpt(raw)}
    return canonical_json(row) + b"\n"


def _make_report(
    counts: Mapping[str, int], inputs: Sequence[Path], evaluations: Sequence[Path], settings: FilterSettings
) -> dict[str, Any]:
    totals = ("read", "train", "validation")
    return {
        "read": counts["read"],
        "train": counts.get("train", 0),
        "validation": counts.get("validation", 0),
        "rejected": {name: count for name, count in sorted(counts.items()) if name not in totals},
        "settings": settings.model_dump(),
        "inputs": {str(file): sha256_file(file) for file in inputs},
        "evaluations": {str(file): sha256_file(file) for file in evaluations},
    }
