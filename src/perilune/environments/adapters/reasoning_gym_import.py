"""Imports one family of reasoning-gym instead of all hundred.

`import reasoning_gym` imports every family, and with them sympy, pyfiglet and more: most of a second in every
process of every stage. This module creates the package without its `__init__` and imports one family. Code
that needs anything else of the package or its registry gets the complete package.
"""

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from perilune.environments.adapters.plotting import defer_plotting

_PACKAGE = "reasoning_gym"
_FACTORY = f"{_PACKAGE}.factory"
_LOCK = RLock()
# Names that need the complete registry. The families themselves import the rest of the factory.
_COMPLETE_ONLY = frozenset(
    {"DATASETS", "CURRICULA", "create_dataset", "create_curriculum", "has_curriculum", "get_score_answer_fn"}
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


def load_all_families() -> dict[str, tuple[type, type]]:
    """Return the classes of the dataset and of its settings, by family."""
    with _LOCK:
        _complete_package()
        return dict(import_module(_FACTORY).DATASETS)


def load_family(name: str) -> tuple[type, type] | None:
    """Return the classes of one family's dataset and settings; None if there is no such family."""
    with _LOCK:
        module = None if _is_complete() else _find_module(name)
        if module is None:
            return load_all_families().get(name)
        if _PACKAGE not in sys.modules:
            _create_partial_package()
        with defer_plotting():
            import_module(module)
        classes: tuple[type, type] = vars(sys.modules[_FACTORY])["DATASETS"][name]
        return classes


def _is_complete() -> bool:
    return _PACKAGE in sys.modules and not isinstance(sys.modules[_PACKAGE], _PartialPackage)


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
    with _LOCK, defer_plotting():
        package = import_module(_PACKAGE)
        if isinstance(package, _PartialPackage):
            for module in (package, sys.modules[_FACTORY]):
                module.__class__ = ModuleType
            assert package.__spec__ is not None and package.__spec__.loader is not None
            package.__spec__.loader.exec_module(package)


@cache
def _find_module(family: str) -> str | None:
    """Return the module that registers a family; None if no source names it."""
    spec = find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder).rglob("*.py")):
            if f'\nDATASET_NAME = "{family}"\n' in file.read_text(encoding="utf-8"):
                return ".".join((_PACKAGE, *file.relative_to(folder).with_suffix("").parts))
    return None
