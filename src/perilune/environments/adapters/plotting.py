"""Keeping matplotlib out of a process that plots nothing.

reasoning-gym imports cellpylib, which imports matplotlib at its top for functions that draw. That takes about
as long as all the rest of reasoning-gym, in each process of each stage.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

_UNWANTED = ("matplotlib", "matplotlib.pyplot", "matplotlib.animation", "matplotlib.collections",
             "mpl_toolkits", "mpl_toolkits.mplot3d")  # fmt: skip


class _Later(ModuleType):
    """Stands for a module; the first use of anything in it imports the real one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            _leave()
        return getattr(import_module(self.__name__), name)


@contextmanager
def plotting_put_off() -> Iterator[None]:
    """What is imported in the block gets matplotlib only when it draws. Does nothing where it is loaded."""
    if "matplotlib" in sys.modules:
        yield
        return
    for name in _UNWANTED:
        sys.modules[name] = _Later(name)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, sys.modules[name])
    vars(sys.modules["mpl_toolkits.mplot3d"])["Axes3D"] = None  # is imported by name, and never used
    try:
        yield
    finally:
        _leave()


def _leave() -> None:
    for name in _UNWANTED:
        if isinstance(sys.modules.get(name), _Later):
            del sys.modules[name]
