"""Algorithms of users: classes that a recipe names by an entry point or as file.py:name."""

import inspect
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import entry_points
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from perilune.errors import RequestError
from perilune.extensions import ALGORITHM_GROUP, CODE_SCHEMA, is_file_reference, load_extension
from perilune.frozen import invalid_value
from perilune.learn.algorithms.base import Algorithm

_LOADED: dict[type[Algorithm], tuple[str, str | None]] = {}  # name and source text of each loaded class


class OrExtension:
    """Annotation of a union of sections with a `name`: it also reads the sections of users' algorithms.

    A section {name, source, ...} becomes an instance of the class, which is serialized as the same section.

    Args:
        names: names of the sections in the union, which no extension can replace.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        write = core_schema.wrap_serializer_function_ser_schema(_serialize)
        return core_schema.no_info_wrap_validator_function(self._read, handler(source), serialization=write)

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        extension = {"type": "object", "required": ["name"], "patternProperties": {"^name$": CODE_SCHEMA}}
        schema = handler(core)
        return {**schema, "anyOf": [*schema["anyOf"], extension, CODE_SCHEMA]}

    def _read(self, value: Any, handler: Callable[[Any], Any]) -> Any:
        if type(value) in _LOADED:
            return value
        section = {"name": value} if isinstance(value, str) else value
        name = section.get("name") if isinstance(section, Mapping) else None
        if not isinstance(name, str) or name in self._names or not _is_extension(name):
            return handler(value)
        options = {key: option for key, option in section.items() if key not in ("name", "source")}
        kind = _load(name, section.get("source"))
        try:
            return kind.model_validate(options)
        except ValidationError as error:
            known = ", ".join(field for field in kind.model_fields if field != "name")
            raise ValueError(f"{invalid_value(error).what}; its options are {known}") from None


def _is_extension(name: str) -> bool:
    return is_file_reference(name) or bool(entry_points(group=ALGORITHM_GROUP, name=name))


def _load(name: str, source: str | None) -> type[Algorithm]:
    try:
        kind: Any = load_extension(name, source, ALGORITHM_GROUP, "algorithm")
    except RequestError as error:
        raise ValueError("; ".join(part for part in (error.what, error.remedy) if part)) from None
    problem = ""
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        problem = "is not a subclass of perilune.learn.algorithms.Algorithm"
    else:
        for method in ("weight_group", "weight_groups"):
            try:
                inspect.signature(getattr(kind, method)).bind(None, None, None)
            except TypeError as error:
                problem = f"has a {method} that does not take the episodes and the context: {error}"
    if problem:
        raise ValueError(f"{name} {problem}")
    loaded: type[Algorithm] = kind
    _LOADED[loaded] = name, source
    return loaded


def _serialize(value: Any, handler: Callable[[Any], Any]) -> Any:
    if type(value) not in _LOADED:
        return handler(value)
    name, source = _LOADED[type(value)]
    section = {"name": name, **({} if source is None else {"source": source})}
    return section | value.model_dump(mode="json", exclude={"name"})
