"""Tasks in files of JSON Lines: each row checked, and a broken one named by file and line."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from perilune.environments.matching import Match, unfit
from perilune.environments.protocol import Message
from perilune.errors import RequestError
from perilune.files import canonical_json, sha256_bytes

LONGEST_LINE = 16 << 20  # bytes; one line cannot fill the memory
ROLES = ("system", "user", "assistant", "tool")
RESERVED = frozenset({"actions", "compact", "completions", "prompts", "task_id"})  # mean something elsewhere
Broken = Literal["stop", "drop"]


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        place: file:line.
        task_id: digest of what is asked, 32 hex digits.
        prompt: what is asked.
        data: all other columns; "answer" as text, where there is one.
    """

    place: str
    task_id: str
    prompt: tuple[Message, ...]
    data: Mapping[str, Any]


class BrokenRowError(ValueError):
    """Why a row is none."""


def read_rows(paths: tuple[Path, ...], match: Match | None, broken: Broken) -> list[list[Row]]:
    """The rows of each of `paths`, a file or a folder of *.jsonl; what was asked before is broken, too.

    Args:
        match: how answers are compared, so that they can be; None where none is needed.
        broken: "stop" at the first broken row, or "drop" all, and log how many.

    Raises:
        RequestError: when a file cannot be read, a path holds no rows, or a row is broken.
    """
    files = tuple(tuple(_files(path)) for path in paths)
    versions = tuple((one.stat().st_mtime_ns, one.stat().st_size) for some in files for one in some)
    return _read_rows(files, versions, match, broken)


@lru_cache(maxsize=2)
def _read_rows(
    files: tuple[tuple[Path, ...], ...], versions: tuple[Any, ...], match: Match | None, broken: Broken
) -> list[list[Row]]:
    asked: dict[str, str] = {}
    dropped: list[str] = []
    found = []
    for some in files:
        rows = [row for file in some for row in _rows(file, match, asked, _policy(broken, dropped))]
        if not rows:
            raise RequestError("holds no tasks", where=str(some[0].parent if len(some) > 1 else some[0]))
        found.append(rows)
    if dropped:
        kept = sum(map(len, found))
        logging.getLogger(__name__).warning(
            "%d of %d rows are broken and left out; the first: %s",
            len(dropped),
            kept + len(dropped),
            dropped[0],
        )
    return found


def _policy(broken: Broken, dropped: list[str]) -> Callable[[str, str], None]:
    def tell(place: str, reason: str) -> None:
        if broken == "stop":
            remedy = "mend the row, or leave broken rows out with broken_rows: drop"
            raise RequestError(reason, where=place, remedy=remedy)
        dropped.append(f"{place}: {reason}")

    return tell


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if not files:
            raise RequestError("the folder has no *.jsonl", where=str(path))
        yield from files
    elif path.is_file():
        yield path
    else:
        raise RequestError("no such file or folder", where=str(path))


def _rows(
    file: Path, match: Match | None, asked: dict[str, str], tell: Callable[[str, str], None]
) -> Iterator[Row]:
    try:
        with file.open("rb") as lines:
            number = 0
            while raw := lines.readline(LONGEST_LINE + 1):
                number += 1
                place = f"{file}:{number}"
                if len(raw) > LONGEST_LINE:
                    while (rest := lines.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                        pass
                    tell(place, f"longer than {LONGEST_LINE:,} bytes")
                elif raw.strip():
                    try:
                        row = _row(raw, place, match)
                        if row.task_id in asked:
                            raise BrokenRowError(f"asks what {asked[row.task_id]} asks")
                    except BrokenRowError as error:
                        tell(place, str(error))
                        continue
                    asked[row.task_id] = place
                    yield row
    except OSError as error:
        raise RequestError(f"cannot be read: {error.strerror}", where=str(file)) from None


def _row(raw: bytes, place: str, match: Match | None) -> Row:
    try:
        row = json.loads(raw.decode("utf-8"), parse_constant=_no_number)
        canonical_json(row)  # refuses halves of surrogate pairs
    except UnicodeError:
        raise BrokenRowError("not UTF-8 text") from None
    except RecursionError:
        raise BrokenRowError("nested too deeply") from None
    except ValueError as error:
        raise BrokenRowError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BrokenRowError("a row is a mapping of columns to values")
    if odd := RESERVED & row.keys():
        raise BrokenRowError(f"the column '{min(odd)}' has a meaning of its own; give it another name")
    prompt = _prompt(row)
    data = {name: value for name, value in row.items() if name not in ("prompt", "messages")}
    if data.get("answer") is None:
        data.pop("answer", None)
    else:
        data["answer"] = _answer(data["answer"])
    if match is not None:
        if "answer" not in data:
            raise BrokenRowError(f"has no answer, and match: {match} needs one")
        if reason := unfit(match, data["answer"]):
            raise BrokenRowError(reason)
    digest = sha256_bytes(canonical_json([dict(message) for message in prompt]))
    return Row(place, digest.removeprefix("sha256:")[:32], prompt, data)


def _prompt(row: Mapping[str, Any]) -> tuple[Message, ...]:
    if ("prompt" in row) == ("messages" in row):
        raise BrokenRowError("needs exactly one of prompt and messages")
    given = row.get("prompt", row.get("messages"))
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise BrokenRowError("the prompt is neither text nor a list of messages")
    for message in given:
        whole = isinstance(message, dict) and message.keys() == {"role", "content"}
        if not whole or message["role"] not in ROLES or not isinstance(message["content"], str):
            raise BrokenRowError(
                f"a message has a role of {', '.join(ROLES)} and text as content, and no more"
            )
    if given[-1]["role"] == "assistant":
        raise BrokenRowError("the last message is the assistant's; what it says goes into the column answer")
    if not given[-1]["content"].strip():
        raise BrokenRowError("the last message is empty")
    return tuple(given)


def _answer(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BrokenRowError(f"the answer is a {type(value).__name__}, neither text nor a number")
    return value if isinstance(value, str) else repr(value)


def _no_number(name: str) -> float:
    raise BrokenRowError(f"{name} is no number that JSON has")
