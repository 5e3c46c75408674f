"""Reads the source files of reward functions, so that a bundle contains them."""

import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perilune.extensions import CodeReference, is_file_reference
from perilune.frozen import Frozen
from perilune.recipe.problems import Problem, ProblemsError, raise_problems, read_text, suggest_name, validate
from perilune.recipe.schema import RewardFunction, Weight, add_rewards
from perilune.recipe.source import KeyPath


class _Terms(Frozen):
    rewards: dict[str, Weight | RewardFunction]


def load_reward_terms(value: Any, base: Path, location: str) -> dict[str, Any]:
    """Validate a `rewards` section from outside a recipe, and read the source of its functions.

    Args:
        base: base of relative paths.
        location: name of the section in messages.

    Raises:
        RequestError: with the first error.
    """
    try:
        return read_reward_terms(value, lambda _: base, ("rewards",))
    except ProblemsError as error:
        raise_problems(error.problems, lambda _: location)


def read_reward_terms(value: Any, base: Callable[[KeyPath], Path], where: KeyPath) -> dict[str, Any]:
    """Validate a `rewards` section, and read the source of its functions.

    Args:
        base: returns the folder to which the file at a key is relative.
        where: path of the section in the document.

    Raises:
        ProblemsError: with all errors.
    """
    terms = validate(_Terms, {"rewards": value}, where[:-1], ".".join(map(str, where[:-1]))).rewards
    return dict(add_rewards({}, read_reward_sources(terms, base, where)).get("rewards", {}))


def read_reward_sources(
    terms: Mapping[str, float | RewardFunction], base: Callable[[KeyPath], Path], where: KeyPath
) -> dict[str, float | RewardFunction]:
    """Return the terms, with the source text of the file in each function from a file.

    Raises:
        ProblemsError: when a file cannot be read, is not Python, or does not define the function.
    """
    read = dict(terms)
    for name, term in terms.items():
        if isinstance(term, RewardFunction) and is_file_reference(term.function) and term.source is None:
            path = (*where, name, "function")
            source = read_source(term.function, base(path), path)
            read[name] = term.model_copy(update={"source": source})
    return read


def read_source_file(reference: str, base: Path, location: str) -> str:
    """Return the text of file.py in the reference "file.py:name" from outside a recipe.

    Args:
        base: folder to which the file is relative.
        location: name of the option or argument in messages.

    Raises:
        RequestError: when the file cannot be read, is not Python, or does not define the name.
    """
    try:
        return read_source(reference, base, (location,))
    except ProblemsError as error:
        raise_problems(error.problems, lambda _: reference)


def read_source_files(
    fields: Mapping[str, Any],
    marks: Mapping[str, CodeReference],
    base: Callable[[KeyPath], Path],
    where: KeyPath,
) -> dict[str, Any]:
    """Return the keys of a stage with the text of every file that they name.

    Args:
        marks: the keys that may name code, see `code_fields`.
        base: returns the folder to which the file at a key is relative.
        where: path of the stage in the document.

    Raises:
        ProblemsError: when a file cannot be read, is not Python, or does not define the name.
    """

    def read(value: Any, path: KeyPath) -> Any:
        section = {"name": value} if isinstance(value, str) else value
        name = section.get("name") if isinstance(section, dict) else None
        if not is_file_reference(name) or "source" in section:
            return value
        return {**section, "source": read_source(str(name), base(path), path)}

    read_fields = dict(fields)
    for key in marks.keys() & fields.keys():
        value, path = fields[key], (*where, key)
        if marks[key].many and isinstance(value, dict):
            read_fields[key] = {name: read(item, (*path, name)) for name, item in value.items()}
        else:
            read_fields[key] = read(value, path)
    return read_fields


def read_source(reference: str, base: Path, path: KeyPath) -> str:
    """Return the text of file.py in the reference "file.py:name".

    Args:
        base: folder to which the file is relative.
        path: key of the reference in the document.

    Raises:
        ProblemsError: when the file cannot be read, is not Python, or does not define the name.
    """
    location, _, attribute = reference.rpartition(":")
    key = ".".join(map(str, path))
    file = (base / Path(location).expanduser()).absolute()
    text = read_text(file, path).removeprefix("\ufeff")
    try:
        defined = [name for node in ast.parse(text, str(file)).body for name in _defined_names(node)]
    except (RecursionError, MemoryError):
        raise ProblemsError([Problem(path, f"{key}: {file} is nested too deeply")]) from None
    except SyntaxError as error:
        what = f"{key}: {file}:{error.lineno} is not valid Python: {error.msg}"
        raise ProblemsError([Problem(path, what)]) from None
    except ValueError as error:  # a null byte
        raise ProblemsError([Problem(path, f"{key}: {file} is not valid Python: {error}")]) from None
    if attribute not in defined:
        what = f"{key}: {file} does not define '{attribute}'"
        remedy = suggest_name(attribute, defined) if defined else "define it there"
        raise ProblemsError([Problem(path, what, remedy)])
    return text


def _defined_names(statement: ast.stmt) -> list[str]:
    """Return the names that a statement of a module defines: def, class, assignment or `from` import."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.ImportFrom(names=names):
            return [alias.asname or alias.name for alias in names]
    return []
