"""Defers the import of matplotlib until something draws.

Some families of reasoning-gym import cellpylib, which imports matplotlib at module level. That takes about as
long as the rest of reasoning-gym.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

_DEFERRED_MODULES = (
    *("matplotlib", "matplotlib.pyplot", "matplotlib.animation", "matplotlib.collections"),
    *("mpl_toolkits", "mpl_toolkits.mplot3d"),
)


class _DeferredModule(ModuleType):
    """A placeholder. The first attribute access imports the real module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            _remove_placeholders()
        return getattr(import_module(self.__name__), name)


@contextmanager
def defer_plotting() -> Iterator[None]:
    """Make modules imported in this context load matplotlib on first use, unless it is already loaded.

    Python warns about the syntax of cellpylib when it compiles it. Users of Perilune cannot change that.
    """
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=".*cellpylib")
    if "matplotlib" in sys.modules:
        yield
        return
    for name in _DEFERRED_MODULES:
        sys.modules[name] = _DeferredModule(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    vars(sys.modules["mpl_toolkits.mplot3d"])["Axes3D"] = None  # imported by name and never used
    try:
        yield
    finally:
        _remove_placeholders()


def _remove_placeholders() -> None:
    for name in _DEFERRED_MODULES:
        if isinstance(sys.modules.get(name), _DeferredModule):
            del sys.modules[name]
