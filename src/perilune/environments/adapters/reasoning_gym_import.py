"""Imports one family of reasoning-gym instead of all hundred, and no matplotlib.

`import reasoning_gym` imports every family, and with them sympy, pyfiglet, matplotlib and more: two seconds
in every process of every stage. This module creates the package without its `__init__` and imports one
family. Code that needs anything else of the package or its registry gets the complete package.
"""

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

_PACKAGE = "reasoning_gym"
_FACTORY = f"{_PACKAGE}.factory"
_LOCK = RLock()
# Names that need the complete registry. The families themselves import the rest of the factory.
_COMPLETE_ONLY = frozenset(
    {"DATASETS", "CURRICULA", "create_dataset", "create_curriculum", "has_curriculum", "get_score_answer_fn"}
)
_PLOTTING = (
    *("matplotlib", "matplotlib.pyplot", "matplotlib.animation", "matplotlib.collections"),
    *("mpl_toolkits", "mpl_toolkits.mplot3d"),
)


class _PartialPackage(ModuleType):
    """The package before its `__init__` has run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in {"__all__", "__version__"}:
            raise AttributeError(name)
        try:
            return import_module(f"{self.__name__}.{name}")
        except ModuleNotFoundError:
            _complete_package()
            return getattr(self, name)


class _PartialFactory(ModuleType):
    """The registry before all families are in it."""

    def __getattribute__(self, name: str) -> Any:
        if name in _COMPLETE_ONLY:
            _complete_package()
        return ModuleType.__getattribute__(self, name)  # this may be a plain module by now


def family_names() -> frozenset[str]:
    """Return the names of all families, from the sources of the package."""
    return frozenset(_modules())


def load_family(name: str) -> tuple[type, type] | None:
    """Return the classes of one family's dataset and settings; None if there is no such family."""
    with _LOCK:
        if name in _modules():
            if _PACKAGE not in sys.modules:
                _create_partial_package()
            with _without_plotting():
                import_module(_modules()[name])
        else:
            _complete_package()  # the user's code may have registered it
        classes: tuple[type, type] | None = vars(sys.modules[_FACTORY])["DATASETS"].get(name)
        return classes


def _create_partial_package() -> None:
    """Make the package without running its `__init__`."""
    spec = find_spec(_PACKAGE)
    assert spec is not None
    sys.modules[_PACKAGE] = package = module_from_spec(spec)
    package.__class__ = _PartialPackage
    import_module(f"{_PACKAGE}.coaching")  # which imports the factory, and fails after it
    sys.modules[_FACTORY].__class__ = _PartialFactory


def _complete_package() -> None:
    """Import all families, once."""
    with _LOCK, _without_plotting():
        package = import_module(_PACKAGE)
        if isinstance(package, _PartialPackage):
            for module in (package, sys.modules[_FACTORY]):
                module.__class__ = ModuleType
            assert package.__spec__ is not None and package.__spec__.loader is not None
            package.__spec__.loader.exec_module(package)


@contextmanager
def _without_plotting() -> Iterator[None]:
    """Import families that use cellpylib without matplotlib, which it imports and which they never use.

    Other code that imports cellpylib gets a complete one.
    """
    if {"cellpylib", "matplotlib"} & sys.modules.keys():
        yield
        return
    # Python warns about the syntax of cellpylib when it compiles it. Users of Perilune cannot change that.
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=".*cellpylib")
    sys.modules.update({name: ModuleType(name) for name in _PLOTTING})
    vars(sys.modules["mpl_toolkits.mplot3d"])["Axes3D"] = None
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name in _PLOTTING or name.startswith("cellpylib")]:
            del sys.modules[name]


@cache
def _modules() -> dict[str, str]:
    """Return the modules that register the families, by family."""
    spec = find_spec(_PACKAGE)
    assert spec is not None and spec.submodule_search_locations is not None
    modules = {}
    for folder in spec.submodule_search_locations:
        for file in sorted(Path(folder).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            if found := re.search(r'^DATASET_NAME = "(\w+)"$', text, re.MULTILINE):
                modules[found[1]] = ".".join((_PACKAGE, *file.relative_to(folder).with_suffix("").parts))
    return modules
