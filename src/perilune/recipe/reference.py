"""Every key a recipe may have, gathered from the models that validate it: for editors, and for the docs.

`python -m perilune.recipe.reference markdown|schema` prints docs/reference/recipe.md or the JSON schema.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from perilune.bundle.plugin import consumed_fields, load_plugin, plugin_names
from perilune.recipe.resolve import environment_registry
from perilune.recipe.schema import Recipe, Stage

STAGE_HEADER = ("name", "task")


@dataclass(frozen=True, slots=True)
class Key:
    """One key a user may write, as the docs show it."""

    name: str
    type: str
    default: str
    description: str


def sections() -> dict[str, tuple[Key, ...]]:
    """Every section of a recipe with its keys: "recipe", "model", "environment: ID", "task: NAME", ..."""
    fields = Recipe.model_fields
    found = {"recipe": _keys(Recipe, only=tuple(fields))}
    for name in ("model", "resources"):
        kinds = (fields[name].annotation, *get_args(fields[name].annotation))
        found[name] = next(
            _keys(one) for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)
        )
    for name, model in environment_models().items():
        found[f"environment: {name}"] = _keys(model)
    found["stages"] = _keys(Stage, only=(*STAGE_HEADER, "environment"))
    for name in plugin_names():
        found[f"task: {name}"] = _keys(load_plugin(name).spec)
    return found | {title: _keys(model) for title, model in _choices().items()}


def user_keys() -> tuple[str, ...]:
    """All keys, sections that only hold other keys left out: what a user can be asked to know.

    Of the options of what is chosen by name, such as an algorithm, a user meets those of one; and those of a
    section that is absent unless somebody asks for it, such as `lora`, only whoever does.
    """
    holders = {"model", "environment", "resources", "stages"}
    choices = _choices()
    return tuple(
        f"{section}/{key.name}"
        for section, keys in sections().items()
        for key in keys
        if not (section in choices or (section == "recipe" and key.name in holders))
        and not _is_in_a_section_of(keys, key)
    )


def _is_in_a_section_of(keys: Sequence[Key], key: Key) -> bool:
    """Whether a key is one of a section that has a key of its own, as sections that may be absent have."""
    return any(key.name.startswith(f"{other.name}.") for other in keys)


def recipe_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a recipe with the installed tasks and environments."""
    schema = _inlined(Recipe)
    header = _inlined(Stage)["properties"]
    stages: list[dict[str, Any]] = []
    for name in plugin_names():
        own = _inlined(load_plugin(name).spec)
        general = {"name": header["name"], "environment": header["environment"]}
        properties = {**general, "task": {"const": name}, **own.get("properties", {})}
        required = [*STAGE_HEADER, *own.get("required", [])]
        closed = {"type": "object", "additionalProperties": False}
        stages.append(closed | {"properties": properties, "required": required})
    environments = [_inlined(model) for model in environment_models().values()]
    schema["properties"]["environment"] = {"anyOf": environments}
    schema["properties"]["stages"] |= {"items": {"anyOf": stages}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def markdown() -> str:
    """The reference page of the docs."""
    lines = [
        "# Recipe",
        "",
        "A recipe is one YAML file. These are all its keys; anything else in it is an error that names the",
        "line and the nearest key. `--set KEY=VALUE` replaces one: `--set seed=1`, `--set rl.steps=10` (a",
        "stage by its name), `--set environment.task=countdown`.",
        "",
        "<!-- Written by `python -m perilune.recipe.reference markdown`; a test keeps it in step. -->",
    ]
    for title, keys in sections().items():
        heading = title if title == "recipe" else f"`{title}`"
        lines += ["", f"## {heading[0].upper()}{heading[1:]}", ""]
        if not keys:
            lines += ["No keys of its own."]
            continue
        lines += ["| key | type | default | |", "|---|---|---|---|"]
        lines += [f"| `{key.name}` | {key.type} | {key.default} | {key.description} |" for key in keys]
    return "\n".join(lines) + "\n"


def environment_models() -> dict[str, type[BaseModel]]:
    """Environments that show the model of their section, by id."""
    registry = environment_registry()
    models = {name: registry.environment_spec(name) for name in registry.environment_ids()}
    return {name: model for name, model in models.items() if model is not None}


def _choices() -> dict[str, type[BaseModel]]:
    """Sections that a task's field holds one of, chosen by its name: "algorithm: grpo", ..."""
    found = {}
    for task in plugin_names():
        for field, info in load_plugin(task).spec.model_fields.items():
            kinds = [kind for kind in get_args(info.annotation) if isinstance(kind, type)]
            for kind in kinds:
                if issubclass(kind, BaseModel) and "name" in kind.model_fields:
                    found[f"{field}: {kind.model_fields['name'].default}"] = kind
    return found


def _keys(model: type[BaseModel], only: tuple[str, ...] | None = None, prefix: str = "") -> tuple[Key, ...]:
    schema = _inlined(model)
    consumed = consumed_fields(model)
    names = only or tuple(model.model_fields)
    return tuple(
        key for name in names for key in _described(prefix + name, name, schema, consumed.get(name, ""))
    )


def _described(shown: str, name: str, schema: dict[str, Any], consumes: str) -> Iterator[Key]:
    """The row of one key; a section inside a task's keys gives a row for each of its own."""
    inner = schema["properties"][name]
    optional = [part for part in inner.get("anyOf", ()) if "properties" in part]
    if optional and schema["title"] != "Recipe":
        yield Key(shown, "section", "", inner.get("description", ""))
        inner = optional[0]
    if "properties" in inner and schema["title"] != "Recipe":
        for deeper in inner["properties"]:
            yield from _described(f"{shown}.{deeper}", deeper, inner, "")
        return
    kind = f"stage that makes a {consumes}" if consumes else _type(inner)
    default = "required" if name in schema.get("required", ()) else _default(inner)
    yield Key(shown, kind, default, inner.get("description", ""))


def _default(schema: dict[str, Any]) -> str:
    value = schema.get("default")
    if isinstance(value, dict) and "name" in value:  # what is chosen by name
        value = value["name"]
    if value in (None, [], {}, "") or isinstance(value, dict):
        return ""
    return f"`{json.dumps(value)}`" if not isinstance(value, str) else f"`{value}`"


def _type(schema: dict[str, Any]) -> str:
    """A JSON schema as a few words."""
    if "anyOf" in schema:
        return " or ".join(_type(part) for part in schema["anyOf"] if part.get("type") != "null")
    if "oneOf" in schema:
        return "section"
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    names = {"string": "text", "array": "list", "object": "section", "boolean": "true or false"}
    kind = names.get(schema.get("type", ""), schema.get("type", "any"))
    if kind == "list" and "items" in schema:
        kind = f"list of {_type(schema['items'])}"
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    limits = [f"{sign} {schema[word]:g}" for word, sign in signs.items() if _tells(schema.get(word))]
    return f"{kind} {', '.join(limits)}".strip()


def _tells(limit: float | None) -> bool:
    return limit is not None and abs(limit) < 2**53  # limits of the machine's integers say nothing


def _inlined(model: type[BaseModel]) -> dict[str, Any]:
    """JSON schema of `model` with its `$defs` put where they are referred to."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(value: Any) -> Any:
        if isinstance(value, list):
            return [inline(item) for item in value]
        if not isinstance(value, dict):
            return value
        target = str(value.get("$ref", "")).removeprefix("#/$defs/")
        dropped = {"$ref", "discriminator"}  # the second has names of definitions, and says nothing new
        rest = {key: inline(item) for key, item in value.items() if key not in dropped}
        return inline(definitions[target]) | rest if target else rest

    inlined: dict[str, Any] = inline(schema)
    return inlined


if __name__ == "__main__":
    asked = sys.argv[1] if len(sys.argv) > 1 else "markdown"
    print(markdown() if asked == "markdown" else json.dumps(recipe_schema(), indent=2), end="")
