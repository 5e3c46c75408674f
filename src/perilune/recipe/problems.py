"""Validation errors in the terms of the recipe, with the key and a remedy."""

import contextlib
import copy
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeGuard, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from perilune.errors import RequestError, closest_name
from perilune.files import read_regular
from perilune.plural import plural
from perilune.recipe.aliases import ALIASES, REMEDIES, find_alias
from perilune.recipe.source import KeyPath

ModelT = TypeVar("ModelT", bound=BaseModel)

_MAX_LISTED_NAMES = 16  # names that an error lists next to the closest name
_MAX_FURTHER_PROBLEMS = 6  # problems that an error lists after the first
_MAX_FILE_BYTES = 1 << 20  # of a file that a recipe names: reward functions, a chat template
_BUT = " but "  # between the value and the expected value
_YAML_TERMS = {  # pydantic's messages use the terms of JSON
    "should be a valid boolean": "should be true or false",
    "should be an object": "should be a section of keys",
    "should be a valid dictionary": "should be a section of keys",
    "should be a valid array": "should be a list",
}
_NAME_PATTERN = re.compile(r"\^\[A-Za-z\]\[A-Za-z0-9_-\]\{0,(\d+)\}\$")  # the pattern of names


@dataclass(frozen=True, slots=True)
class Problem:
    """One error: the key, the problem and the remedy."""

    path: KeyPath
    what: str
    remedy: str = ""
    missing: bool = False  # the key is missing


class ProblemsError(Exception):
    """All errors in one part of a document. `raise_problems` turns them into the user's error."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        self.problems = problems


def name_character(name: str) -> str:
    """Name the first character of a misspelled name that is not ASCII: it may look like one that is."""
    character = next((character for character in name if not character.isascii()), "")
    if not character:
        return ""
    return f" (it contains U+{ord(character):04X}, {unicodedata.name(character, 'without a name')})"


def suggest_name(name: str, valid: Iterable[str]) -> str:
    """Return the remedy for a name not in `valid`: the key that means the same, or the closest name."""
    names = list(valid)
    meant = find_alias(name, names)
    if not meant and name in REMEDIES:
        return REMEDIES[name]
    if not meant and name in ALIASES:
        elsewhere = " or ".join(f"'{key}'" for key in ALIASES[name])
        return f"{elsewhere}, which belongs in another section; here one of: {', '.join(names)}"
    close = meant or closest_name(name.strip().lower(), names)
    choices = f"one of: {', '.join(names)}" if names else "remove it; no names are possible here"
    if close:
        return f"'{close}'; {choices}" if len(names) <= _MAX_LISTED_NAMES else f"'{close}'"
    if "config" in names:
        return f"config: {{{name}: ...}}, if it is a setting of the task; else {choices}"
    return choices


def raise_problems(problems: Sequence[Problem], locate: Callable[[KeyPath], str]) -> NoReturn:
    """Raise the first of `problems` as the user's error, together with the others.

    Missing keys come last, because a misspelled key is also a missing key.

    Raises:
        RequestError: always.
    """
    first, *others = (
        RequestError(problem.what, where=locate(problem.path), remedy=problem.remedy)
        for problem in sorted(problems, key=lambda problem: problem.missing)
    )
    if len(others) > _MAX_FURTHER_PROBLEMS:
        hidden = len(others) - _MAX_FURTHER_PROBLEMS
        others[_MAX_FURTHER_PROBLEMS:] = [RequestError(plural(hidden, "further error"))]
    first.others = others
    raise first


def read_text(file: Path, path: KeyPath) -> str:
    """Return the text of the file that the key at `path` names.

    Raises:
        ProblemsError: when the file cannot be read.
    """
    what = f"{'.'.join(map(str, path))}: {file} cannot be read"
    try:
        return read_regular(file, _MAX_FILE_BYTES).decode("utf-8")
    except RequestError as error:
        raise ProblemsError([Problem(path, f"{what}: {error.what}", error.remedy)]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ProblemsError([Problem(path, f"{what}: {reason}")]) from None


def validate(model: type[ModelT], value: Any, path: KeyPath, label: str) -> ModelT:
    """Validate the `value` at `path` as a `model`; `label` is the name of the path in messages.

    Types are strict: "2" is not a number, and 1 is not true.

    Raises:
        ProblemsError: with all errors.
    """
    try:
        return model.model_validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        errors = [dict(detail) for detail in error.errors(include_url=False)]
    details = [detail for detail in errors if not _is_wrong_alternative(detail, value)] or errors
    details.sort(key=lambda error: error["type"] != "extra_forbidden")  # a misspelled key is also missing
    problems: dict[KeyPath, Problem] = {}
    for detail in details:
        problem = _problem(model, detail, value, path, label)
        earlier = problems.get(problem.path)
        if earlier and earlier.what.rpartition(_BUT)[0] == problem.what.rpartition(_BUT)[0] != "":
            what = f"{earlier.what} or {problem.what.rpartition(_BUT)[2].removeprefix('should be ')}"
            problem = replace(earlier, what=what)  # alternatives of a union, which failed at the same value
        problems[problem.path] = problem
    raise ProblemsError([_add_remedy(problem, model, value, path) for problem in problems.values()])


def _add_remedy(problem: Problem, model: type[BaseModel], value: Any, path: KeyPath) -> Problem:
    """Return `problem` with the value that the user probably means as its remedy, if this value is valid."""
    inside = problem.path[len(path) :]
    if problem.remedy or problem.missing or not inside:
        return problem
    changed = copy.deepcopy(value)
    section = changed
    for part in inside[:-1]:
        section = section[part]
    for meant in _meanings(section[inside[-1]]):
        section[inside[-1]] = meant
        try:
            model.model_validate_json(json.dumps(changed), strict=True)
        except ValidationError as error:
            paths = [_written_path(dict(detail), changed) for detail in error.errors()]
            if any(written[: len(inside)] == inside for written in paths):
                continue
        text = json.dumps(meant, ensure_ascii=False)
        if isinstance(meant, dict):
            text = "{" + ", ".join(f"{key}: {name}" for key, name in meant.items()) + "}"
        return replace(problem, remedy=f"{inside[-1]}: {text}" if isinstance(inside[-1], str) else text)
    return problem


def _meanings(given: Any) -> list[Any]:
    """Return values of other types that the user may mean by `given`, the likeliest first."""
    if given == "":
        return []
    if isinstance(given, str):
        word = given.strip().lower()
        meanings: list[Any] = []
        if word in ("off", "no", "false", "n", "none", "null"):
            meanings = [False, 0, None]
        elif word in ("on", "yes", "true", "y"):
            meanings = [True, {}]
        with contextlib.suppress(ValueError):
            number = float(word)
            if math.isfinite(number):
                meanings += [int(number), number] if number.is_integer() else [number]
        sections = [{key: given} for key in ("name", "preset", "path", "function")]
        return [*meanings, *([word] if word != given else []), [given], *sections]
    if isinstance(given, bool):
        return [{}, str(given).lower()] if given else [0, None, "false"]
    if isinstance(given, float) and given.is_integer():
        return [int(given)]
    return [str(given)] if isinstance(given, int | float) else []


def _is_wrong_alternative(detail: Mapping[str, Any], value: Any) -> bool:
    """Return whether the error only says that a section or list lacks another type that its key allows."""
    *_, last = detail["loc"] or ("",)
    return (
        isinstance(detail["input"], dict | list)
        and detail["type"].endswith("_type")
        and last not in _written_path(detail, value)
    )


def _written_path(detail: Mapping[str, Any], value: Any) -> KeyPath:
    """Return the path of the error as the user wrote it.

    For a union, pydantic's location also contains the chosen alternative, which is not in the document.
    """
    written: list[str | int] = []
    for part in detail["loc"]:
        if part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int):
            written.append(part)
            value = value[part]
    return (*written, detail["loc"][-1]) if detail["type"] == "missing" else tuple(written)


def _problem(
    model: type[BaseModel], detail: dict[str, Any], value: Any, path: KeyPath, label: str
) -> Problem:
    location = _written_path(detail, value)
    key = ".".join(str(part) for part in ([label] if label else []) + list(location))
    full = (*path, *location)
    if detail["type"] == "extra_forbidden":
        valid = _find_owners(model, detail["loc"])[0].model_fields
        name = str(location[-1])
        return Problem(full, f"{key} is not a known key{name_character(name)}", suggest_name(name, valid))
    if detail["type"] == "missing":
        field = _find_owners(model, detail["loc"])[0].model_fields.get(str(location[-1]))
        meaning = f"set it: {field.description}" if field and field.description else ""
        return Problem(full, f"{key} is missing", meaning, missing=True)
    if detail["type"] == "union_tag_not_found":
        kinds = _find_owners(model, (*detail["loc"], ""))
        names = [name for kind in kinds for name in _selecting_names(kind)]
        missing = detail["ctx"]["discriminator"].strip("'")
        return Problem(full, f"{key}.{missing} is missing", f"one of: {', '.join(dict.fromkeys(names))}")
    if detail["type"] == "union_tag_invalid":
        tag = detail["ctx"]["tag"]
        names = detail["ctx"]["expected_tags"].replace("'", "").split(", ")
        return Problem(full, f"{key}: no {location[-1]} '{tag}'", suggest_name(tag, names))
    return _value_problem(detail, key, full)


def _value_problem(detail: dict[str, Any], key: str, full: KeyPath) -> Problem:
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    message = _YAML_TERMS.get(message, message).replace("be False", "be false")
    given = detail["input"]
    if detail["type"] == "too_short":
        message = f"needs at least {detail['ctx']['min_length']} entries" if given else "is empty"
    if isinstance(given, dict | list):
        if detail["type"] == "string_type":
            message = f"should be one text, not a {'list' if isinstance(given, list) else 'section of keys'}"
        return Problem(full, f"{key}: {message}" if key else message)
    text = json.dumps(given, ensure_ascii=False)[:80]
    remedy = ""
    if name := _NAME_PATTERN.fullmatch(detail.get("ctx", {}).get("pattern", "")):
        longest = int(name[1]) + 1
        message = f"must begin with a letter and have at most {longest} letters, digits, _ and -"
        remedy = re.sub(r"[^A-Za-z0-9_-]+", "-", given).lstrip("_-0123456789")[:longest].rstrip("_-")
    return Problem(full, f"{key} is {text}{_BUT}{message}", remedy)


def _find_owners(model: type[BaseModel], location: KeyPath) -> list[type[BaseModel]]:
    """Return the possible models of the section around the last part of pydantic's location."""
    kinds = [model]
    for part in location[:-1]:
        named = [kind for kind in kinds if part in (*_selecting_names(kind), kind.__name__)]
        if named:
            kinds = named
        elif part in kinds[0].model_fields:
            kinds = _models_in(kinds[0].model_fields[str(part)].annotation) or kinds
    return kinds


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if _is_model(annotation):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]


def _is_model(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _selecting_names(kind: type[BaseModel]) -> list[Any]:
    """Return the names or types that select this model in a union."""
    fields = [kind.model_fields[key] for key in ("name", "type") if key in kind.model_fields]
    return [name for field in fields for name in (field.default, *get_args(field.annotation))]
