"""Lists all keys of a recipe, from the models that validate it, for the docs and for editors.

`python -m perilune.recipe.reference markdown|schema` prints docs/reference/recipe.md or the JSON schema.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from perilune.bundle.plugin import consumed_fields, file_fields, load_plugin, plugin_names
from perilune.extensions import CODE_SCHEMA, CodeFile
from perilune.recipe.resolve import describe_kind, import_environment_registry
from perilune.recipe.schema import Recipe, Stage

STAGE_HEADER = ("name", "task")


@dataclass(frozen=True, slots=True)
class Key:
    """One key as the docs show it."""

    name: str
    type: str
    default: str
    description: str


def list_sections() -> dict[str, tuple[Key, ...]]:
    """Return the keys of each section: "recipe", "model", "environment: ID", "task: NAME", ..."""
    fields = Recipe.model_fields
    sections = {"recipe": _list_keys(Recipe, only=tuple(fields))}
    for name in ("model", "resources"):
        kinds = (fields[name].annotation, *get_args(fields[name].annotation))
        sections[name] = next(
            _list_keys(kind) for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)
        )
    for name, model in environment_models().items():
        sections[f"environment: {name}"] = _list_keys(model)
    sections["stages"] = _list_keys(Stage, only=(*STAGE_HEADER, "environment"))
    for name in plugin_names():
        sections[f"task: {name}"] = _list_keys(load_plugin(name).spec)
    return sections | {title: _list_keys(model) for title, model in _named_choices().items()}


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a recipe with the installed tasks and environments."""
    schema = _inline_schema(Recipe)
    header = _inline_schema(Stage)["properties"]
    stages: list[dict[str, Any]] = []
    for name in plugin_names():
        own = _inline_schema(load_plugin(name).spec)
        general = {"name": header["name"], "environment": header["environment"]}
        properties = {**general, "task": {"const": name}, **own.get("properties", {})}
        required = [*STAGE_HEADER, *own.get("required", [])]
        closed = {"type": "object", "additionalProperties": False}
        stages.append(closed | {"properties": properties, "required": required})
    environments = [_inline_schema(model) for model in environment_models().values()]
    of_file = {"type": "object", "required": ["id"], "patternProperties": {"^id$": CODE_SCHEMA}}
    environments.append(of_file)
    schema["properties"]["environment"] = {"anyOf": environments}
    schema["properties"]["stages"] |= {"items": {"anyOf": stages}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def render_markdown() -> str:
    lines = [
        "# Recipe",
        "",
        "A recipe is one YAML file with the keys below. Any other key is an error that names the line and",
        "the closest key. `--set KEY=VALUE` sets a key on the command line: `--set seed=1`,",
        "`--set environment.task=countdown`, and `--set rl.steps=10` for the stage named rl.",
        "",
        "<!-- Written by `python -m perilune.recipe.reference markdown`; a test keeps it in step. -->",
    ]
    for title, keys in list_sections().items():
        heading = title if title == "recipe" else f"`{title}`"
        lines += ["", f"## {heading[0].upper()}{heading[1:]}", ""]
        if not keys:
            lines += ["No keys of its own."]
            continue
        lines += ["| key | type | default | |", "|---|---|---|---|"]
        lines += [f"| `{key.name}` | {key.type} | {key.default} | {key.description} |" for key in keys]
    return "\n".join(lines) + "\n"


def environment_models() -> dict[str, type[BaseModel]]:
    """Return the models of environment sections, by the id of the environment."""
    registry = import_environment_registry()
    models = {name: registry.environment_spec(name) for name in registry.environment_ids()}
    return {name: model for name, model in models.items() if model is not None}


def _named_choices() -> dict[str, type[BaseModel]]:
    """Return the sections that a key of a task selects by name: "algorithm: grpo", ..."""
    sections = {}
    for task in plugin_names():
        for field, info in load_plugin(task).spec.model_fields.items():
            kinds = [kind for kind in get_args(info.annotation) if isinstance(kind, type)]
            for kind in kinds:
                if issubclass(kind, BaseModel) and "name" in kind.model_fields and kind is not CodeFile:
                    sections[f"{field}: {kind.model_fields['name'].default}"] = kind
    return sections


def _list_keys(model: type[BaseModel], only: tuple[str, ...] | None = None) -> tuple[Key, ...]:
    schema = _inline_schema(model)
    consumed: dict[str, str] = {
        name: f"name of a stage that makes {describe_kind(kind)}"
        for name, kind in consumed_fields(model).items()
    }
    for name in file_fields(model, dict.fromkeys(consumed, "./")):
        consumed[name] += ", or a path"
    names = only or tuple(model.model_fields)
    return tuple(key for name in names for key in _key_rows(name, name, schema, consumed.get(name, "")))


def _key_rows(path: str, name: str, schema: dict[str, Any], consumes: str) -> Iterator[Key]:
    """Yield the row of a key, or a row for each key of a nested section.

    A section whose keys are names, such as `rewards`, also has rows for the keys below a name.
    """
    inner = schema["properties"][name]
    optional = [part for part in inner.get("anyOf", ()) if "properties" in part]
    if optional and schema["title"] != "Recipe":
        yield Key(path, "section", "", inner.get("description", ""))
        inner = optional[0]
    if "properties" in inner and schema["title"] != "Recipe":
        defaults = inner.get("default") or {}  # overrides the defaults of the fields
        fields = {
            deeper: field | ({"default": defaults[deeper]} if deeper in defaults else {})
            for deeper, field in inner["properties"].items()
        }
        for deeper in fields:
            yield from _key_rows(f"{path}.{deeper}", deeper, inner | {"properties": fields}, "")
        return
    kind = consumes or _format_type(inner)
    default = "required" if name in schema.get("required", ()) else _format_default(inner)
    yield Key(path, kind, default, inner.get("description", ""))
    for named in (inner.get("additionalProperties"), *inner.get("patternProperties", {}).values()):
        parts = [named, *named.get("anyOf", ())] if isinstance(named, dict) else []
        for part in parts:
            if part.get("title") != CodeFile.__name__:  # users write its path instead
                for deeper in part.get("properties", ()):
                    yield from _key_rows(f"{path}.NAME.{deeper}", deeper, part, "")


def _format_default(schema: dict[str, Any]) -> str:
    value = schema.get("default")
    if isinstance(value, dict) and "name" in value:  # a choice by name
        value = value["name"]
    if value in (None, [], {}, "") or isinstance(value, dict):
        return ""
    return f"`{json.dumps(value)}`" if not isinstance(value, str) else f"`{value}`"


def _format_type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        parts = (_format_type(part) for part in schema["anyOf"] if part.get("type") != "null")
        return " or ".join(dict.fromkeys(parts))
    if schema.get("format") == CODE_SCHEMA["format"]:
        return f"`{schema['format']}`"
    if "oneOf" in schema:
        return "section"
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    names = {"string": "text", "array": "list", "object": "section", "boolean": "true or false"}
    kind = names.get(schema.get("type", ""), schema.get("type", "any"))
    if kind == "list" and "items" in schema:
        kind = f"list of {_format_type(schema['items'])}"
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    limits = [
        f"{sign} {schema[word]:.10g}" for word, sign in signs.items() if _is_explicit_limit(schema.get(word))
    ]
    return f"{kind} {', '.join(limits)}".strip()


def _is_explicit_limit(limit: float | None) -> bool:
    return limit is not None and abs(limit) < 2**53  # not a bound of 64-bit integers


def _inline_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of `model` with each `$ref` replaced by its definition."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(value: Any) -> Any:
        if isinstance(value, list):
            return [inline(item) for item in value]
        if not isinstance(value, dict):
            return value
        target = str(value.get("$ref", "")).removeprefix("#/$defs/")
        dropped = {"$ref", "discriminator"}  # a discriminator repeats names of definitions
        rest = {key: inline(item) for key, item in value.items() if key not in dropped}
        return inline(definitions[target]) | rest if target else rest

    inlined: dict[str, Any] = inline(schema)
    return inlined


if __name__ == "__main__":
    kind = sys.argv[1] if len(sys.argv) > 1 else "markdown"
    print(render_markdown() if kind == "markdown" else json.dumps(recipe_schema(), indent=2), end="")
