"""Loads a recipe: reads the YAML file, applies the `--set` overrides and validates the result."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from perilune.errors import RequestError, closest_name
from perilune.files import read_regular
from perilune.recipe.problems import Problem, name_character, raise_problems, suggest_name
from perilune.recipe.resolve import resolve
from perilune.recipe.schema import Recipe
from perilune.recipe.source import MAX_BYTES, Document, KeyPath, parse_yaml, require_characters


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe.

    Args:
        source: path of a YAML file, or the name of a bundled recipe such as "quickstart".
        overrides: "key.key=value" with the value in YAML. The first key may be a stage: "rl.steps=10".

    Raises:
        RequestError: with file, line, key and remedy of the first error; the other errors are in `others`.
    """
    path = Path(source)
    if isinstance(source, str) and not path.exists() and source in bundled_recipes():
        path = bundled_recipe(source)
    document = parse_yaml(_read_recipe(path), str(path))
    if not isinstance(document.value, dict):
        raise RequestError(
            "a recipe is a mapping of keys to values",
            where=document.locate(()) or str(path),
            remedy=f"see the recipes in {_bundled_folder()}",
        )
    for override in overrides:
        _apply_override(document, override)
    return resolve(document, path.parent)


def bundled_recipe(name: str) -> Path:
    """Return the path of a recipe that ships with the package.

    Raises:
        RequestError: when no bundled recipe has that name.
    """
    path = _bundled_folder() / f"{name}.yaml"
    if name not in bundled_recipes():
        raise RequestError(f"no bundled recipe '{name}'", remedy=f"one of: {', '.join(bundled_recipes())}")
    return path


def bundled_recipes() -> tuple[str, ...]:
    """List the recipes that ship with the package, such as "quickstart" and "smollm2/arithmetic".

    Recipes in a folder start from the pretrained model that the folder is named after.
    """
    folder = _bundled_folder()
    return tuple(sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml")))


def _bundled_folder() -> Path:
    return Path(str(resources.files("perilune").joinpath("recipes")))


def _read_recipe(path: Path) -> str:
    if path.is_dir():
        raise RequestError("is a folder, not a recipe", where=str(path), remedy="the path of a YAML file")
    try:
        if not path.exists():
            close = closest_name(path.stem, bundled_recipes())
            remedy = f"a path to a YAML file; bundled recipes: {', '.join(bundled_recipes())}"
            remedy = f"'{close}', which is bundled, or a path to a YAML file" if close else remedy
            raise RequestError("no such recipe", where=str(path), remedy=remedy)
        return read_regular(path, MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise RequestError("not UTF-8 text", where=f"{path}:{line}") from None
    except OSError as error:
        raise RequestError(f"cannot be read: {error.strerror}", where=str(path)) from None


def _apply_override(document: Document, override: str) -> None:
    """Set the key of "key.key=value" in the document."""
    key, equals, text = override.partition("=")
    location = f"--set {override.encode(errors='backslashreplace').decode()}"
    require_characters(override, location)
    if not equals or not key.strip():
        raise RequestError("is not KEY=VALUE", where=location, remedy="--set rl.steps=10")
    try:
        parsed = parse_yaml(text, location)
    except RequestError as error:
        raise RequestError(error.what, where=location) from None
    document.set(_key_path(document.value, key.strip().split("."), location), parsed.value, location)


def _key_path(value: dict[str, Any], keys: list[str], location: str) -> KeyPath:
    """Return the path that `keys` name, with the name of a stage replaced by its position."""
    stages = value.get("stages")
    sections = stages if isinstance(stages, list) else []
    names = [stage.get("name") if isinstance(stage, dict) else None for stage in sections]
    if keys[0] == "stages" and len(keys) > 1:
        keys = keys[1:]
        known = [str(name) for name in names if name]
    elif keys[0] in Recipe.model_fields:
        return tuple(keys)
    else:
        known = [*Recipe.model_fields, *(str(name) for name in names if name)]
    if keys[0] in names and len(keys) > 1:
        return ("stages", names.index(keys[0]), *keys[1:])
    if keys[0] in names:
        stage = sections[names.index(keys[0])]
        key = next((key for key, value in stage.items() if isinstance(value, int | float)), "task")
        what = f"{keys[0]} is a stage; set one of its keys, such as {keys[0]}.{key}"
        raise RequestError(what, where=location)
    what = f"no key or stage '{keys[0]}'{name_character(keys[0])}"
    problem = Problem((), what, suggest_name(keys[0], known))
    raise_problems([problem], lambda _: location)
    raise AssertionError("unreachable")
