"""Convert conversations between formats; rows that cannot be converted are rejected with a reason."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from perilune.data.chat_format import from_openai, from_sharegpt, to_openai, to_sharegpt
from perilune.data.lines import check_file, excerpt, read_lines
from perilune.data.records import TraceRecord, parse_provenance, parse_record, records_file, to_row
from perilune.errors import RequestError
from perilune.files import canonical_json, finite_number, fsync_directory, parse_strict_json, sha256_bytes

Format = Literal["records", "openai", "sharegpt"]

MAX_REASONS = 100  # reasons that the report counts separately; the rest are "others"


@dataclass(frozen=True, slots=True)
class ImportDefaults:
    """Values for fields that a row lacks.

    Attributes:
        score: None rejects rows without a score.
    """

    environment: str = "chat"
    source: str = "imported"
    score: float | None = None


def rejects_file(out: Path) -> Path:
    """Return the path of the rejected rows of a conversion to `out`."""
    return out.with_name(f"{out.stem}.rejected{out.suffix}")


def convert_files(
    inputs: Sequence[Path], to: Format, out: Path, defaults: ImportDefaults = ImportDefaults()
) -> dict[str, Any]:
    """Write all conversations of `inputs` to `out` in the format `to`; in bounded memory.

    The format of each row is detected. Rejected rows go to a file next to `out`.

    Returns:
        The number of rows read, written, and rejected by reason.

    Raises:
        RequestError: when a file cannot be read, or is no JSON Lines file, when `out` is a folder, or when
            an output would replace an input.
    """
    if out.is_dir():
        raise RequestError("is a folder", where=str(out), remedy="name a file in it, such as chats.jsonl")
    files = list(map(records_file, inputs))
    for path in files:
        check_file(path)
    rejects = rejects_file(out)
    for path in files:
        if path.resolve() in (out.resolve(), rejects.resolve()):
            raise RequestError("would be overwritten", where=str(path), remedy="name another file for --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    partial = {path: path.with_name(path.name + ".partial") for path in (out, rejects)}
    with ExitStack() as stack:
        for path in partial.values():
            stack.callback(path.unlink, missing_ok=True)
        kept, rejected = (stack.enter_context(partial[path].open("wb")) for path in (out, rejects))
        for path in files:
            for number, _, raw, problem in read_lines(path):
                record, reason = (None, problem) if problem else _read_row(raw, defaults)
                if record is not None:
                    counts["written"] += 1
                    kept.write(canonical_json(_to_format(record, to)) + b"\n")
                    continue
                counts[reason if reason in counts or len(counts) < MAX_REASONS else "others"] += 1
                row = {"file": str(path), "line": number, "reason": reason}
                rejected.write(canonical_json({**row, "row": excerpt(raw)}) + b"\n")
        for output in (kept, rejected):
            output.flush()
            os.fsync(output.fileno())
        for path in (rejects, out):
            partial[path].replace(path)
    fsync_directory(out.parent)
    written = counts.pop("written", 0)
    reasons = dict(sorted(counts.items()))
    return {"read": written + counts.total(), "written": written, "rejected": reasons}


def _read_row(raw: bytes, defaults: ImportDefaults) -> tuple[TraceRecord | None, str]:
    """Return the record of a row, or the reason why it has none."""
    try:
        row = parse_strict_json(raw)
        if isinstance(row, dict) and "digest" in row:
            return parse_record(raw, ""), ""
        return _import_row(row, defaults), ""
    except RecursionError:
        return None, "nested too deeply"
    except RequestError as error:
        return None, error.what
    except ValueError as error:
        return None, f"not valid JSON: {error}"


def _import_row(row: Any, defaults: ImportDefaults) -> TraceRecord:
    if not isinstance(row, dict) or ("messages" in row) == ("conversations" in row):
        raise RequestError("a row needs either messages or conversations")
    shared = "conversations" in row
    messages = from_sharegpt(row.pop("conversations")) if shared else from_openai(row.pop("messages"))
    first = next((index for index, message in enumerate(messages) if message["role"] == "assistant"), 0)
    digest = sha256_bytes(canonical_json(messages[:first]))[:32]
    provenance, details = row.pop("provenance", None), row.pop("details", None) or {}
    if not isinstance(details, dict):
        raise RequestError("field 'details' is not an object")
    record = TraceRecord(
        messages,
        environment=row.pop("environment", defaults.environment),
        task_id=row.pop("task_id", digest),
        score=_read_score(row.pop("score", defaults.score)),
        source=row.pop("source", defaults.source),
        seed=row.pop("seed", 0),
        provenance=None if provenance is None else parse_provenance(provenance),
        details=details | row or None,
    )
    return parse_record(canonical_json(to_row(record)), "")


def _read_score(value: Any) -> float:
    if value is None:
        raise RequestError("the row has no score; set one with --score")
    if (score := finite_number(value)) is None:
        raise RequestError("field 'score' is not a finite number")
    return score


def _to_format(record: TraceRecord, to: Format) -> Mapping[str, Any]:
    """Return the row of a record. Other formats have no digest, because their rows may be edited."""
    row = to_row(record)
    if to == "records":
        return row
    del row["digest"]
    messages = row.pop("messages")
    if to == "openai":
        return {"messages": to_openai(messages), **row}
    return {"conversations": to_sharegpt(messages), **row}
