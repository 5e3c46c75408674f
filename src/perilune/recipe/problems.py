"""What is wrong with a document, in words for the person who wrote it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from perilune.errors import RequestError
from perilune.recipe.source import KeyPath

ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong: at which key, what, and what would be right."""

    path: KeyPath
    what: str
    remedy: str = ""


class ProblemsError(Exception):
    """Everything wrong with one part of a document; never reaches a user as it is."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        self.problems = problems


def nearest(name: str, valid: Iterable[str]) -> str:
    """Advice for a name that is not among `valid`: the one that was probably meant, then all of them."""
    names = list(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    listed = f"one of: {', '.join(names)}" if names else "nothing is allowed here"
    return f"'{close[0]}'; {listed}" if close else listed


def raise_first(problems: Sequence[Problem], place: Callable[[KeyPath], str]) -> NoReturn:
    """Raise the first of `problems` as the user's error; the others are counted.

    Raises:
        RequestError: always.
    """
    first, *others = problems
    more = f" (and {len(others)} more)" if others else ""
    raise RequestError(first.what + more, where=place(first.path), remedy=first.remedy)


def validate(model: type[ModelT], value: Any, path: KeyPath, label: str) -> ModelT:
    """Validate `value`, found at `path`, as a `model`; `label` is how messages name that path.

    Types are taken as written: "2" is not a number and 1 is not true.

    Raises:
        ProblemsError: everything that is wrong with it.
    """
    try:
        return model.model_validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        problems = [_problem(model, dict(detail), path, label) for detail in error.errors(include_url=False)]
    raise ProblemsError(problems)


def _problem(model: type[BaseModel], detail: dict[str, Any], path: KeyPath, label: str) -> Problem:
    location, owner = _written(model, tuple(detail["loc"]))
    key = ".".join(str(part) for part in ([label] if label else []) + list(location))
    full = (*path, *location)
    if detail["type"] == "extra_forbidden":
        return Problem(full, f"{key} is not a known key", nearest(str(location[-1]), owner.model_fields))
    if detail["type"] == "missing":
        return Problem(full, f"{key} is missing")
    if detail["type"] == "union_tag_not_found":
        return Problem(full, f"{key}.name is missing")
    if detail["type"] == "union_tag_invalid":
        asked = detail["ctx"]["tag"]
        names = detail["ctx"]["expected_tags"].replace("'", "").split(", ")
        return Problem(full, f"{key}: no {location[-1]} is called '{asked}'", nearest(asked, names))
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if isinstance(detail["input"], dict | list):
        return Problem(full, f"{key} {message}" if key else message)
    shown = json.dumps(detail["input"], ensure_ascii=False)
    return Problem(full, f"{key} is {shown[:80]} but {message}")


def _written(model: type[BaseModel], location: KeyPath) -> tuple[KeyPath, type[BaseModel]]:
    """`location` inside `model` as the user wrote it, and the model whose key its last part is.

    Where a section may be one of several models, the validator's location has the name of the one chosen
    after the section's key; nobody wrote it there.
    """
    written: list[str | int] = []
    kinds: tuple[Any, ...] = ()
    for part in location:
        chosen = [kind for kind in kinds if _is_model(kind) and _name_of(kind) == part]
        if chosen:
            model, kinds = chosen[0], ()
            continue
        written.append(part)
        annotation = model.model_fields[str(part)].annotation if str(part) in model.model_fields else None
        kinds = get_args(annotation)
        if _is_model(annotation):
            model = annotation
    return tuple(written), model


def _is_model(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _name_of(kind: type[BaseModel]) -> Any:
    return kind.model_fields["name"].default if "name" in kind.model_fields else None
