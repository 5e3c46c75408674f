"""What is wrong with a document, in words for the person who wrote it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

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
    location: KeyPath = tuple(detail["loc"])
    key = ".".join(str(part) for part in ([label] if label else []) + list(location))
    full = (*path, *location)
    if detail["type"] == "extra_forbidden":
        valid = _fields_at(model, location[:-1])
        return Problem(full, f"{key} is not a known key", nearest(str(location[-1]), valid))
    if detail["type"] == "missing":
        return Problem(full, f"{key} is missing")
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if isinstance(detail["input"], dict | list):
        return Problem(full, f"{key} {message}" if key else message)
    shown = json.dumps(detail["input"], ensure_ascii=False)
    return Problem(full, f"{key} is {shown[:80]} but {message}")


def _fields_at(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """Names of the fields of the model that lies at `location` inside `model`."""
    for part in location:
        annotation = model.model_fields[str(part)].annotation if str(part) in model.model_fields else None
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
    return list(model.model_fields)
