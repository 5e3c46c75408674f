"""Parses and validates request bodies in bounded time.

The JSON parser and pydantic hold the GIL, so all other threads wait for them. Their time grows with the
number of values, not of bytes. Therefore values are counted first, and validation stops at the first error.
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

_MOST_VALUES = 10_000  # of a schema, of chat_template_kwargs, and of logit_bias
_DEEPEST = 64
_SHOWN = 200  # characters of an unknown argument
_MOST = {b"{": 1 << 16, b"[": 1 << 16, b":": 1 << 15, b",": 1 << 18, b'"': 1 << 18}
"""Most characters that start or separate values, counted outside strings; quotes count everywhere."""


def read_body(data: bytes, kind: type[BodyT]) -> BodyT:
    """Parse and validate the request in `data`.

    Raises:
        ApiError: 400, with the first error.
    """
    return validated(_parse(data), kind)


async def read_request(request: Request, kind: type[BodyT], lanes: Lanes) -> tuple[BodyT, int]:
    """The validated body of a request, and its size in bytes.

    Raises:
        ApiError: 400, with the first error.
    """
    data = await request.body()
    return await lanes.short_or_long(len(data), lambda: read_body(data, kind)), len(data)


def validated(document: Any, kind: type[BodyT]) -> BodyT:
    """The request in a JSON value.

    Raises:
        ApiError: 400, with the first error.
    """
    if not isinstance(document, dict):
        raise ApiError(400, "the body is not a JSON object")
    if len(document) > len(kind.model_fields):  # pydantic would list them all
        unknown = next(key for key in document if key not in kind.model_fields)
        raise ApiError(400, _unrecognised(unknown), param=shorten(unknown))
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = _most_telling(error.errors(include_url=False, include_input=False))
    place = _place(first, document)
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


def _most_telling(errors: list[Any]) -> Any:
    """The first error; of a value that may have several types, the one in a part of it or of its own type."""
    field = errors[0]["loc"][:1]
    return next(
        (
            one
            for one in errors
            if one["loc"][:1] == field and not one["type"].endswith(("_type", "_parsing"))
        ),
        errors[0],
    )


def _place(error: Any, document: Any) -> list[str]:
    """The keys and indices of the invalid value, without the names of types that pydantic puts between."""
    parts = list(error["loc"])
    missing = [str(parts.pop())] if error["type"] == "missing" else []
    place = []
    for part in parts:
        kind = list if isinstance(part, int) else dict
        if isinstance(document, kind) and (kind is list or part in document):
            document = document[part]
            place.append(str(part))
    return place + missing


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


class Body(BaseModel):
    """A JSON object of a request. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, document: Any) -> Any:
        """Refuse the first unknown argument; pydantic would list all."""
        if isinstance(document, dict):
            known = _names(cls)
            for name in document:
                if name not in known:
                    shown = name[:_SHOWN].encode(errors="replace").decode()
                    raise PydanticCustomError("extra_forbidden", "{name}", {"name": shown})
        return document


class RequestBody(Body):
    """The body of a request of OpenAI's API. A null argument counts as absent.

    Attributes:
        unsupported: arguments that are refused, but for values that have no effect.
        no_effect: arguments that cannot change an answer, and are ignored.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    no_effect: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_unsupported(cls, body: Any) -> Any:
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


def bounded(document: Any) -> Any:
    """A JSON value of bounded size, for a validator."""
    check_values(document, _MOST_VALUES, _DEEPEST)
    return document


def parts_of_types(*types: str) -> BeforeValidator:
    """Names the first part of another type in a content; pydantic would only say that a list is no string."""
    read = " and ".join(types)

    def check(content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and (kind := part.get("type", types[0])) not in types:
                raise ValueError(
                    f"a part has the type {shorten(str(kind))!r}, and this server reads only {read}"
                )
        return content

    return BeforeValidator(check)


def returnable(document: Any) -> Any:
    """A JSON value of bounded size that a response can repeat, for a validator."""
    try:
        json.dumps(bounded(document), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair") from None
    return document


Document = Annotated[dict[str, Any], BeforeValidator(bounded)]
Returned = Annotated[dict[str, Any], BeforeValidator(returnable)]


def _is_one_of(value: Any, ones: tuple[Any, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in ones)  # True is not 1
