"""One row of JSON Lines as a task: what is accepted, and what is broken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from perilune.environments.core.matching import Match, unfit
from perilune.environments.core.protocol import Message
from perilune.files import canonical_json, sha256_bytes, strict_json

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


def parsed(raw: bytes, place: str, match: Match | None) -> Row:
    """The row that a line holds.

    Raises:
        BrokenRowError: saying why it holds none.
    """
    try:
        row = strict_json(raw)
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
