"""Docstrings name parameters, attributes and exceptions that exist."""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "perilune"
ENTRY = re.compile(r"    (\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*): ")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def entries(docstring: str, section: str) -> set[str]:
    """The names that a section of a docstring describes."""
    match = re.search(rf"^{section}:\n((?:    .*\n?|\n)+)", docstring, re.MULTILINE)
    lines = map(ENTRY.match, match[1].splitlines()) if match else ()
    return {name.lstrip("*") for line in lines if line for name in line[1].split(", ")}


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = function.args
    every = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
    return {arg.arg for arg in every if arg is not None}


def members(definition: ast.ClassDef) -> set[str]:
    """Fields, methods, attributes of `self`, and parameters of methods."""
    names = set()
    for node in ast.walk(definition):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.FunctionDef(name=name):
                names |= {name, *parameters(node)}
    return names


def imported(module: ast.Module) -> set[str]:
    statements = (node for node in ast.walk(module) if isinstance(node, ast.Import | ast.ImportFrom))
    return {alias.asname or alias.name for statement in statements for alias in statement.names}


def wrong_entries(module: ast.Module, exceptions: set[str]) -> Iterator[str]:
    exceptions = exceptions | imported(module)
    for node in ast.walk(module):
        if not isinstance(node, Definition) or not (docstring := ast.get_docstring(node)):
            continue
        known = members(node) if isinstance(node, ast.ClassDef) else parameters(node)
        for name in sorted((entries(docstring, "Args") | entries(docstring, "Attributes")) - known):
            yield f"line {node.lineno}: {node.name} has no {name}"
        for name in sorted(entries(docstring, "Raises")):
            if "." not in name and name not in exceptions:  # a dotted name is of another package
                yield f"line {node.lineno}: {node.name} raises no {name}"


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def test_docstrings_describe_what_exists(modules: dict[str, ast.Module]) -> None:
    classes = {
        node.name
        for module in modules.values()
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
    }
    known = classes | set(dir(builtins))
    assert [
        f"{path}, {entry}" for path, module in modules.items() for entry in wrong_entries(module, known)
    ] == []


def test_wrong_entries_are_found() -> None:
    module = ast.parse(
        'def scale(x, *rest):\n    """Scale.\n\n    Args:\n        x, rest: numbers.\n        by: factor.\n\n'
        '    Raises:\n        ValueError: never.\n        OddError: never.\n    """\n'
        'class Line:\n    """A line.\n\n    Attributes:\n        text: its text.\n        end: its end.\n'
        '    """\n\n    text: str\n'
    )
    assert list(wrong_entries(module, {"ValueError"})) == [
        "line 1: scale has no by",
        "line 1: scale raises no OddError",
        "line 12: Line has no end",
    ]
