"""The base of environments that change another one."""

from collections.abc import Iterator
from typing import Any

from perilune.environments.core.protocol import Environment, Split, Task


class EnvironmentWrapper:
    """An environment that forwards to another one. Subclasses override methods."""

    def __init__(self, environment: Environment) -> None:
        self.id = environment.id
        self.confined = getattr(environment, "confined", True)
        self._environment = environment

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._environment, name)

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        return self._environment.tasks(split, seed)

    def close(self) -> None:
        self._environment.close()


def unwrap(environment: Environment) -> Environment:
    """Return the environment inside all wrappers."""
    while isinstance(environment, EnvironmentWrapper):
        environment = environment._environment
    return environment
