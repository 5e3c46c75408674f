"""Trace records: the JSON Lines that supervised stages train on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from perilune.data.lines import read_lines
from perilune.errors import RequestError
from perilune.files import canonical_json, finite_number, parse_strict_json, sha256_bytes, write_json_lines

_AGENT_KEY = "agent"  # in `details`
_ROLES = ("assistant", "system", "tool", "user")


@dataclass(frozen=True, slots=True)
class Provenance:
    """The generator of a record.

    Attributes:
        generator: name of the teacher, or "sampled".
        settings: SHA-256 of all settings of the generator, see `settings_digest`.
    """

    generator: str
    version: str
    settings: str


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One verified conversation.

    Attributes:
        messages: ({"role", "content"}, ...), the last one by the assistant. `weight` 0 in a message of the
            assistant says that it is not learned; other keys are dropped.
        environment: id of the environment that verified it.
        task_id: the task that it answers.
        score: the reward that the environment gave it.
        source: generator and strategy, e.g. "arithmetic/scratchpad".
        seed: seed of the generator.
        digest: SHA-256 of the messages alone, so equal conversations have equal digests.
        provenance: what wrote the record; None for imported records.
        details: further JSON values about its origin.
    """

    messages: Sequence[Mapping[str, Any]]
    environment: str
    task_id: str
    score: float
    source: str
    seed: int
    digest: str = field(init=False)
    provenance: Provenance | None = None
    details: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        messages = tuple({name: m[name] for name in _kept_keys(m)} for m in self.messages)
        object.__setattr__(self, "messages", messages)
        object.__setattr__(self, "digest", sha256_bytes(canonical_json(list(messages))))

    @property
    def prompt(self) -> str:
        """The text of all messages before the last answer."""
        return "\n".join(str(message["content"]) for message in self.messages[:-1])

    def of_sub_agent(self, agent: str, messages: Sequence[Mapping[str, Any]]) -> TraceRecord:
        """Return the record of a sub-agent's conversation in the same episode."""
        return replace(self, messages=messages, details={**(self.details or {}), _AGENT_KEY: agent})

    @property
    def agent(self) -> str:
        """The sub-agent that had this conversation; "" for the player."""
        return str((self.details or {}).get(_AGENT_KEY, ""))

    @property
    def is_mixed(self) -> bool:
        """True if a mixed policy made the record, so that duplicates show how often it makes each move."""
        return bool((self.details or {}).get("mixed"))

    @property
    def answer(self) -> str:
        """The last message of the assistant."""
        return str(self.messages[-1]["content"])


def _kept_keys(message: Mapping[str, Any]) -> tuple[str, ...]:
    unlearned = message.get("role") == "assistant" and message.get("weight", 1) == 0
    return ("role", "content", "weight") if unlearned else ("role", "content")


def settings_digest(**settings: Any) -> str:
    """SHA-256 of settings as canonical JSON, so equal settings have equal digests."""
    return sha256_bytes(canonical_json(settings))


def write_records(path: Path, records: Iterable[TraceRecord]) -> int:
    """Write records as canonical JSON Lines, completely or not at all; return their number."""
    rows = [to_row(record) for record in records]
    write_json_lines(path, rows)
    return len(rows)


def to_row(record: TraceRecord) -> dict[str, Any]:
    """Return a record as a JSON object, without empty details."""
    return {name: value for name, value in asdict(record).items() if name != "details" or value is not None}


def records_file(path: Path) -> Path:
    """Return the path, or records.jsonl inside of it if it is a folder."""
    return path / "records.jsonl" if path.is_dir() else path


def read_records(path: Path) -> list[TraceRecord]:
    """Read a file of records, or a folder's records.jsonl.

    Raises:
        RequestError: when the file cannot be read or a row is broken, naming file, line and field.
    """
    file = records_file(path)
    records = []
    for line in read_lines(file):
        where = f"{file}:{line.number}"
        if line.problem:
            raise RequestError(line.problem, where=where)
        records.append(parse_record(line.raw, where))
    return records


def deduplicate(records: Iterable[TraceRecord]) -> Iterator[TraceRecord]:
    """Yield the first record of each agent in a task; of equal records that are not mixed, only the first."""
    digests: set[str] = set()
    tasks: set[tuple[str, str, str]] = set()
    for record in records:
        task = (record.environment, record.task_id, record.agent)
        if (record.is_mixed or record.digest not in digests) and task not in tasks:
            digests.add(record.digest)
            tasks.add(task)
            yield record


def is_validation(task_id: str, validation: float) -> bool:
    """Return whether a task is in the held-out share `validation` (0 to 1), which its id decides."""
    digest = hashlib.sha256(f"validation:{task_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < validation * 2**64


def parse_record(line: bytes, where: str) -> TraceRecord:
    """Parse one line of a file of records.

    Raises:
        RequestError: when the line is not a record, naming `where` and the field.
    """
    return record_from_row(parse_object(line, where), where)


def record_from_row(value: Mapping[str, Any], where: str) -> TraceRecord:
    """Return the record of a decoded row.

    Raises:
        RequestError: when the row is not a record, naming `where` and the field.
    """
    if "digest" not in value and {"messages", "conversations"} & value.keys():
        raise RequestError(
            "the row is a conversation, not a record",
            where=where,
            remedy="perilune data convert FILE --to records --score 1 --out records.jsonl",
        )
    row = check_fields(value, where, TraceRecord.__slots__, optional=("provenance", "details"))
    check_messages(row, "messages", where, weights=True)
    if row["messages"][-1]["role"] != "assistant":
        raise RequestError("field 'messages' does not end with the assistant's answer", where=where)
    for name in ("environment", "task_id", "source", "digest"):
        require(isinstance(row[name], str) and row[name] != "", name, "text that is not empty", row, where)
    require(type(row["seed"]) is int, "seed", "an integer", row, where)
    require(finite_number(row["score"]) is not None, "score", "a finite number", row, where)
    provenance, details = row.get("provenance"), row.get("details")
    if provenance is not None:
        provenance = parse_provenance(provenance, where)
    require(details is None or isinstance(details, dict), "details", "a mapping", row, where)
    digest = row.pop("digest")
    record = TraceRecord(**(row | {"score": float(row["score"]), "provenance": provenance}))
    if digest != record.digest:
        raise RequestError("field 'digest' does not fit the messages: the row was changed", where=where)
    return record


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in a line.

    Raises:
        RequestError: for invalid JSON, and for another value than an object.
    """
    try:
        row = parse_strict_json(line)
    except ValueError as error:
        raise RequestError(f"not valid JSON: {error}", where=where) from None
    if not isinstance(row, dict):
        raise RequestError("a row must be a JSON object", where=where)
    return row


def check_fields(
    row: Mapping[str, Any], where: str, fields: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a copy of `row`, which must have exactly the given fields.

    Raises:
        RequestError: for missing fields and unknown fields.
    """
    remedy = f"a row has the fields {', '.join(fields)}"
    for name in fields:
        if name not in row and name not in optional:
            raise RequestError(f"the field '{name}' is missing", where=where, remedy=remedy)
    for name in row:
        if name not in fields:
            raise RequestError(f"unknown field '{name}'", where=where, remedy=remedy)
    return dict(row)


def parse_provenance(raw: Any, where: str = "") -> Provenance:
    """Return the provenance of a row.

    Raises:
        RequestError: unless `raw` has exactly the fields of a provenance, all of them text.
    """
    names = set(Provenance.__slots__)
    if not isinstance(raw, dict) or set(raw) != names or not all(isinstance(raw[key], str) for key in names):
        raise RequestError(
            "field 'provenance' needs exactly generator, version and settings, all text", where=where
        )
    return Provenance(**raw)


def check_messages(row: Mapping[str, Any], name: str, where: str, *, weights: bool = False) -> None:
    """Check that a field is a list of messages with role and content.

    Args:
        weights: whether messages of the assistant may have `weight` 0.

    Raises:
        RequestError: naming the first message without them.
    """
    messages = row[name]
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"field '{name}' is not a list of messages", where=where)
    for index, message in enumerate(messages):
        key = f"{name}[{index}]"
        keys = _kept_keys(message) if weights and isinstance(message, dict) else ("role", "content")
        if not isinstance(message, dict) or message.keys() != set(keys):
            raise RequestError(f"field '{key}' needs exactly role and content", where=where)
        if message["role"] not in _ROLES or not isinstance(message["content"], str):
            what = f"field '{key}': role must be one of {', '.join(_ROLES)}, and content text"
            raise RequestError(what, where=where)


def require(holds: bool, name: str, kind: str, row: Mapping[str, Any], where: str) -> None:
    """Raise an error that field `name` is not `kind`, unless `holds`."""
    if not holds:
        raise RequestError(f"field '{name}' is {row[name]!r}, not {kind}"[:300], where=where)
