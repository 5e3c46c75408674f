"""Reads the source files of reward functions, so that a bundle contains them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from perilune.bundle.job import Frozen
from perilune.errors import RequestError
from perilune.files import read_regular
from perilune.recipe.problems import Problem, ProblemsError, nearest, raise_first, validate
from perilune.recipe.schema import RewardFunction, Weight, with_rewards

LARGEST = 1 << 20  # bytes of a file with reward functions


class _Terms(Frozen):
    rewards: dict[str, Weight | RewardFunction]


def reward_terms(value: Any, base: Path, place: str) -> dict[str, Any]:
    """Validate a `rewards` section from outside a recipe, and read the source of its functions.

    Args:
        base: base of relative paths.
        place: name of the section in messages.

    Raises:
        RequestError: with the first error.
    """
    try:
        terms = validate(_Terms, {"rewards": value}, (), "").rewards
        found = {
            name: with_source(name, term, base) if isinstance(term, RewardFunction) else term
            for name, term in terms.items()
        }
    except ProblemsError as error:
        raise_first(error.problems, lambda _: place)
    return dict(with_rewards({}, found).get("rewards", {}))


def with_source(name: str, term: RewardFunction, base: Path) -> RewardFunction:
    """The reward `name` with the source text of its file (relative to `base`), if it has a file.

    Raises:
        ProblemsError: when the file cannot be read, is not Python, or does not define the function.
    """
    place, _, attribute = term.function.rpartition(":")
    if not place.endswith(".py") or term.source is not None:
        return term
    path = ("rewards", name, "function")
    key = ".".join(path)
    file = (base / Path(place).expanduser()).absolute()
    try:
        text = read_regular(file, LARGEST).decode("utf-8")
        defined = [
            one.name
            for one in ast.parse(text, str(file)).body
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        ]
    except RequestError as error:
        raise ProblemsError(
            [Problem(path, f"{key}: {file} cannot be read: {error.what}", error.remedy)]
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ProblemsError([Problem(path, f"{key}: {file} cannot be read: {reason}")]) from None
    except (RecursionError, MemoryError):
        raise ProblemsError([Problem(path, f"{key}: {file} is nested too deeply")]) from None
    except SyntaxError as error:
        what = f"{key}: {file}:{error.lineno} is not valid Python: {error.msg}"
        raise ProblemsError([Problem(path, what)]) from None
    if attribute not in defined:
        what = f"{key}: {file} does not define '{attribute}'"
        raise ProblemsError([Problem(path, what, nearest(attribute, defined))])
    return term.model_copy(update={"source": text})
