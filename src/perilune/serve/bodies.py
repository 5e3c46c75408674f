"""Parsing and validation of request bodies in bounded time.

The JSON parser and pydantic hold the GIL, so all other threads wait for them. They take time for each value
rather than each byte. So values are counted before parsing, and validation stops at the first error.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from perilune.serve.errors import ApiError, shorten
from perilune.serve.lanes import Lanes

BodyT = TypeVar("BodyT", bound=BaseModel)

_MAX_VALUES = 10_000  # of a schema, of chat_template_kwargs, and of logit_bias
_MAX_DEPTH = 64
_MAX_SHOWN_CHARS = 200  # of an unknown argument
_MAX_CHARACTER_COUNTS = {b"{": 1 << 16, b"[": 1 << 16, b":": 1 << 15, b",": 1 << 18, b'"': 1 << 18}
"""Maximum counts of characters that start or separate values, outside strings; quotes count everywhere."""


def read_body(data: bytes, kind: type[BodyT]) -> BodyT:
    """Parse and validate the request in `data`.

    Raises:
        ApiError: 400, with the first error.
    """
    return validate_body(_parse(data), kind)


async def read_request(request: Request, kind: type[BodyT], lanes: Lanes) -> tuple[BodyT, int]:
    """Return the validated body of a request, and its size in bytes.

    Raises:
        ApiError: 400, with the first error.
    """
    request.state.fields = kind.model_fields  # the fields that an error may name as `param`
    data = await request.body()
    return await lanes.short_or_long(len(data), lambda: read_body(data, kind)), len(data)


def validate_body(document: Any, kind: type[BodyT]) -> BodyT:
    """Validate a JSON value as a request.

    Raises:
        ApiError: 400, with the first error.
    """
    if not isinstance(document, dict):
        raise ApiError(400, "the body is not a JSON object")
    if len(document) > len(kind.model_fields):  # pydantic would list them all
        unknown = next(key for key in document if key not in kind.model_fields)
        raise ApiError(400, _unknown_argument(unknown), param=shorten(unknown))
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = _select_error(error.errors(include_url=False, include_input=False))
    path = _error_path(first, document)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        path.append(message)
        message = _unknown_argument(".".join(path))
    field = shorten(".".join(path)) or next((key for key in document if message.startswith(f"{key} ")), "")
    if first["type"] == "missing":
        message = f"{field} is missing"
    elif path and first["type"] != "extra_forbidden":
        message = f"{field}: {message}"
    raise ApiError(400, message, param=field or None)


def _select_error(errors: list[Any]) -> Any:
    """Return the first error; for a value with several possible types, that of the type which matches."""
    field = errors[0]["loc"][:1]
    return next(
        (
            error
            for error in errors
            if error["loc"][:1] == field and not error["type"].endswith(("_type", "_parsing"))
        ),
        errors[0],
    )


def _error_path(error: Any, document: Any) -> list[str]:
    """Return the keys and indices of the invalid value, without the type names that pydantic adds."""
    parts = list(error["loc"])
    missing = [str(parts.pop())] if error["type"] == "missing" else []
    path = []
    for part in parts:
        kind = list if isinstance(part, int) else dict
        if isinstance(document, kind) and (kind is list or part in document):
            document = document[part]
            path.append(str(part))
    return path + missing


def _unknown_argument(argument: str) -> str:
    return f"unrecognized argument: {shorten(argument)}"


def check_size(document: Any) -> Any:
    """Return a JSON value that has at most `_MAX_VALUES` values and `_MAX_DEPTH` levels, in linear time.

    Raises:
        ValueError: when it has more.
    """
    waiting, count = [(document, 1)], 1
    while waiting:
        value, depth = waiting.pop()
        if not isinstance(value, dict | list):
            continue
        count += len(value)
        if count > _MAX_VALUES:
            raise ValueError(f"more than {_MAX_VALUES:,} values")
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
        waiting += [(child, depth + 1) for child in (value.values() if isinstance(value, dict) else value)]
    return document


def _parse(data: bytes) -> Any:
    if not data:
        raise ApiError(400, "the body is empty")
    _check_count(data)
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        reason = f"{error.msg}, at character {error.pos}"
    except (ValueError, RecursionError) as error:  # not Unicode, too many digits, or deep nesting
        reason = str(error)
    raise ApiError(400, f"the body is not JSON: {reason}", code="invalid_json")


def _check_count(data: bytes) -> None:
    if all(data.count(character) <= most for character, most in _MAX_CHARACTER_COUNTS.items()):
        return
    if data.count(b'"') <= _MAX_CHARACTER_COUNTS[b'"']:
        unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        structure = b"".join(unescaped.split(b'"')[::2])
        if all(structure.count(character) <= most for character, most in _MAX_CHARACTER_COUNTS.items()):
            return
    raise ApiError(400, "the body has too many values", code="too_many_values")


class Body(BaseModel):
    """A JSON object of a request. Unknown keys and values of other types are refused, as OpenAI does."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, document: Any) -> Any:
        """Refuse the first unknown argument; pydantic would list all."""
        if isinstance(document, dict):
            known = _names(cls)
            for name in document:
                if name not in known:
                    shortened = name[:_MAX_SHOWN_CHARS].encode(errors="replace").decode()
                    raise PydanticCustomError("extra_forbidden", "{name}", {"name": shortened})
        return document


class RequestBody(Body):
    """The body of a request of OpenAI's API. Null arguments count as missing.

    Attributes:
        unsupported: arguments that are refused, unless they have one of the listed values, which have no
            effect.
        no_effect: arguments that are ignored, because they cannot change an answer.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    no_effect: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            raise ValueError("not a JSON object")  # noqa: TRY004 - pydantic's own way
        kept = {}
        for name, value in body.items():
            if value is None:
                continue
            if name in cls.model_fields or not (name in cls.unsupported or name in cls.no_effect):
                kept[name] = value
            elif name in cls.unsupported and not _is_one_of(value, cls.unsupported[name]):
                raise ValueError(f"{name} is not supported")
        return kept


@cache
def _names(body: type[Body]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in body.model_fields.items())


def require_part_types(*types: str) -> BeforeValidator:
    """Return a validator of contents whose error names the first part that has another type."""
    read = " and ".join(types)

    def check(content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and (kind := part.get("type", types[0])) not in types:
                raise ValueError(
                    f"a part has the type {shorten(str(kind))!r}, and this server reads only {read}"
                )
        return content

    return BeforeValidator(check)


def check_repeatable(document: Any) -> Any:
    """Validate that a JSON value is small, and that a response can repeat it."""
    try:
        json.dumps(check_size(document), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair") from None
    return document


Document = Annotated[dict[str, Any], BeforeValidator(check_size)]
Repeatable = Annotated[dict[str, Any], BeforeValidator(check_repeatable)]


def _is_one_of(value: Any, others: tuple[Any, ...]) -> bool:
    return any(type(value) is type(other) and value == other for other in others)  # True is not 1
