"""The shape of the source: no import cycles, short functions with few parameters."""

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
ROOT, PACKAGE = SOURCE.parent, SOURCE / "perilune"
POSTPONED = "from __future__ import annotations\n"
ON_OLDER_PYTHONS = (  # files that run on other machines or interpreters
    *PACKAGE.glob("bundle/remote/*.py"),
    *PACKAGE.glob("execution/providers/ray/cluster/*.py"),
    PACKAGE / "execution/providers/frames.py",
    PACKAGE / "execution/providers/skypilot/bridge.py",
    PACKAGE / "redaction.py",
)
MOST_LINES = 60  # of a function, without its docstring
MOST_PARAMETERS = 7

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def modules(root: Path) -> dict[str, Path]:
    """Modules under a folder by dotted name; a package is its `__init__`."""
    names = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports(name: str, path: Path, known: Mapping[str, Path]) -> set[str]:
    """Modules that a module imports: at its top, in functions, and for type checkers."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            inner = {f"{base}.{alias.name}" for alias in node.names}
            names |= inner & known.keys() or {base}
    return (names & known.keys()) - {name}


def cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""
    reached = {name: _reachable(name, edges) for name in edges}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in edges
        if name in reached[name]
    }
    return sorted(sorted(group) for group in groups)


def _reachable(name: str, edges: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    open_ = [*edges[name]]
    while open_:
        if (module := open_.pop()) not in seen:
            seen.add(module)
            open_ += edges[module]
    return seen


def test_modules_have_no_import_cycles() -> None:
    known = modules(SOURCE)
    # `import perilune` loads its public names on first use; no module imports them from there.
    edges = {name: imports(name, path, known) for name, path in known.items() if name != "perilune"}
    edges = {name: {module for module in targets if module != "perilune"} for name, targets in edges.items()}
    assert not cycles(edges)


@pytest.mark.parametrize(
    "text", ["import p.b", "def f():\n    from p import b", "if TYPE_CHECKING:\n    from . import b"]
)
def test_cycles_finds_every_kind_of_import(tmp_path: Path, text: str) -> None:
    (tmp_path / "p").mkdir()
    for name, content in {"__init__": "", "a": text, "b": "from p.a import x", "c": "import p.a"}.items():
        (tmp_path / "p" / f"{name}.py").write_text(content)
    known = modules(tmp_path)
    assert cycles({name: imports(name, path, known) for name, path in known.items()}) == [["p.a", "p.b"]]


def functions() -> Iterator[tuple[str, Function]]:
    """Every function of the source, with its file, line and name."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(parsed(path)):
            if isinstance(node, Function):
                yield f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}", node


def lines(function: Function) -> int:
    """Lines of a function, without its docstring and without nested functions and classes."""
    body = [*function.body[1:]] if ast.get_docstring(function) is not None else [*function.body]
    left_out = {line for node in body for inner in _inner(node) for line in _span(inner)}
    own = {line for node in body for line in _span(node)} - left_out
    signature = function.body[0].lineno - function.lineno
    return signature + len(own)


def _inner(node: ast.AST) -> Iterator[ast.stmt]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _inner(child)


def _span(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def is_exempt(place: str, function: Function) -> bool:
    """Commands have a parameter for each option; Triton kernels have one for each pointer and stride."""
    is_kernel = any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
    return is_kernel or (place.startswith("perilune/cli/") and not function.name.startswith("_"))


def test_functions_are_short() -> None:
    long = {
        place: count
        for place, function in functions()
        if (count := lines(function)) > MOST_LINES and not is_exempt(place, function)
    }
    assert not long, f"more than {MOST_LINES} lines: {long}"


def test_functions_take_few_parameters() -> None:
    many = {}
    for place, function in functions():
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
        if len(names) > MOST_PARAMETERS and not is_exempt(place, function):
            many[place] = len(names)
    assert not many, f"more than {MOST_PARAMETERS} parameters: {many}"


def test_annotations_are_postponed_only_where_needed(tmp_path: Path) -> None:
    """Needed for forward references and type-checking imports. Ruff finds them in a copy without it."""
    postponed = set()
    folders = (ROOT / name for name in ("src", "tests", "benchmarks", "examples"))
    for path in (file for folder in folders for file in folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if POSTPONED in text and path not in ON_OLDER_PYTHONS:
            copy = tmp_path / str(path.relative_to(ROOT)).replace("/", ".")
            copy.write_text(text.replace(POSTPONED, ""), encoding="utf-8")
            postponed.add(copy)
    options = "--isolated --no-cache --select=F821,TC004 --target-version=py311 --output-format=json"
    command = [sys.executable, "-m", "ruff", "check", *options.split(), str(tmp_path)]
    findings = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    needless = postponed - {Path(finding["filename"]) for finding in findings}
    assert not needless, f"remove {POSTPONED}" + "\n".join(sorted(path.name for path in needless))
