"""Parses and validates request bodies in bounded time.

The JSON parser and pydantic hold the GIL, so all other threads wait for them. Their time grows with the
number of values, not of bytes. Therefore values are counted first, and validation stops at the first error.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from perilune.serve.errors import ApiError, shorten

Body = TypeVar("Body", bound=BaseModel)

_MOST = {b"{": 1 << 16, b"[": 1 << 16, b":": 1 << 15, b",": 1 << 18, b'"': 1 << 18}
"""Most characters that start or separate values, counted outside strings; quotes count everywhere."""


def read_body(data: bytes, kind: type[Body]) -> Body:
    """Parse and validate the request in `data`.

    Raises:
        ApiError: 400, with the first error.
    """
    document = _parse(data)
    if isinstance(document, dict) and len(document) > len(kind.model_fields):  # pydantic would list them all
        unknown = next(key for key in document if key not in kind.model_fields)
        raise ApiError(400, _unrecognised(unknown), param=shorten(unknown))
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    place = [str(part) for part in first["loc"]]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        place.append(message)
        message = _unrecognised(".".join(place))
    field = shorten(".".join(place))
    if first["type"] == "missing":
        message = f"{field} is missing"
    elif field and first["type"] != "extra_forbidden":
        message = f"{field}: {message}"
    raise ApiError(400, message, param=field or None)


def _unrecognised(argument: str) -> str:
    return f"unrecognised argument: {shorten(argument)}"


def check_values(document: Any, most: int, deepest: int) -> None:
    """Check that a JSON value has at most `most` values and `deepest` levels, in time O(`most`).

    Raises:
        ValueError: when it has more.
    """
    waiting, seen = [(document, 1)], 1
    while waiting:
        value, depth = waiting.pop()
        if not isinstance(value, dict | list):
            continue
        seen += len(value)
        if seen > most:
            raise ValueError(f"more than {most:,} values")
        if depth > deepest:
            raise ValueError(f"nested deeper than {deepest} levels")
        waiting += [(one, depth + 1) for one in (value.values() if isinstance(value, dict) else value)]


def _parse(data: bytes) -> Any:
    if not data:
        raise ApiError(400, "the body is empty")
    _check_count(data)
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        reason = f"{error.msg}, at character {error.pos}"
    except (
        ValueError,
        RecursionError,
    ) as error:  # not Unicode, a number with too many digits, or deep nesting
        reason = str(error)
    raise ApiError(400, f"the body is not JSON: {reason}", code="invalid_json")


def _check_count(data: bytes) -> None:
    if all(data.count(character) <= most for character, most in _MOST.items()):
        return
    if data.count(b'"') <= _MOST[b'"']:
        unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        structure = b"".join(unescaped.split(b'"')[::2])
        if all(structure.count(character) <= most for character, most in _MOST.items()):
            return
    raise ApiError(400, "the body has too many values", code="too_many_values")
