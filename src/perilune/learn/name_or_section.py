"""Recipe fields that accept a bare name for a section that has no other keys."""

from collections.abc import Iterable
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema


class NameOrSection:
    """Annotation of a union of sections with the discriminator `name`: reads `grpo` as `{name: grpo}`."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_section, handler(source))

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [{"enum": self._names}, handler(core)]}


def _section(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value
