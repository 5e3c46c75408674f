"""The files of a recipe's reward functions, read so that a bundle holds all that it needs."""

from __future__ import annotations

import ast
from pathlib import Path

from perilune.recipe.problems import Problem, ProblemsError, nearest
from perilune.recipe.schema import RewardFunction


def with_source(name: str, term: RewardFunction, base: Path) -> RewardFunction:
    """The function of the term `name` with the text of its file (relative to `base`), if it is in one.

    Raises:
        ProblemsError: when the file cannot be read, is no Python, or does not define the function.
    """
    place, _, attribute = term.function.rpartition(":")
    if not place.endswith(".py") or term.source is not None:
        return term
    path = ("rewards", name, "function")
    key = ".".join(path)
    file = (base / Path(place).expanduser()).absolute()
    try:
        text = file.read_text(encoding="utf-8")
        defined = [
            one.name
            for one in ast.parse(text, str(file)).body
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        ]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ProblemsError([Problem(path, f"{key}: {file} cannot be read: {reason}")]) from None
    except SyntaxError as error:
        what = f"{key}: {file}:{error.lineno} is no Python: {error.msg}"
        raise ProblemsError([Problem(path, what)]) from None
    if attribute not in defined:
        what = f"{key}: {file} defines no '{attribute}'"
        raise ProblemsError([Problem(path, what, nearest(attribute, defined))])
    return term.model_copy(update={"source": text})
