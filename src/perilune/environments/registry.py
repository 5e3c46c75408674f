"""Environments by id: ours, and any that a package offers under the entry-point group `perilune.environments`.

An entry point is a callable that takes the environment section of a recipe (a mapping with `id`) and
returns an Environment; it raises RequestError when the section is wrong. When it has an attribute `spec`,
that is the pydantic model of the section, from which recipes are checked line by line and documented.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from pydantic import BaseModel

from perilune.environments.protocol import Environment
from perilune.errors import RequestError

ENVIRONMENT_GROUP = "perilune.environments"
FACTORY_ID = "factory"

Factory = Callable[[Mapping[str, Any]], Environment]


@cache
def _factories() -> dict[str, str]:
    found = {point.name: point.value for point in entry_points(group=ENVIRONMENT_GROUP)}
    return found | {"reasoning_gym": "perilune.environments.reasoning_gym:make"}


def environment_ids() -> tuple[str, ...]:
    """Ids that a recipe's `environment.id` may name, sorted."""
    return tuple(sorted(_factories()))


def make_environment(spec: Mapping[str, Any]) -> Environment:
    """Build the environment that `spec` describes: its `id`, and the fields that this id takes.

    `{"id": "factory", "factory": "module:function", ...}` calls a function that is not installed as an
    entry point, for tests and notebooks.

    Raises:
        RequestError: when the id is missing or unknown, or the section is wrong.
    """
    name = spec.get("id")
    if name == FACTORY_ID:
        return _load(str(spec.get("factory", "")))(spec)
    if not isinstance(name, str) or name not in _factories():
        raise _unknown(name)
    return _load(_factories()[name])(spec)


def environment_spec(name: str) -> type[BaseModel] | None:
    """Model of the section of the environment called `name`; None when its factory shows none.

    Raises:
        RequestError: when there is no such environment.
    """
    if name not in _factories():
        raise _unknown(name)
    model: type[BaseModel] | None = getattr(_load(_factories()[name]), "spec", None)
    return model


def _unknown(name: object) -> RequestError:
    return RequestError(
        f"no environment called {name!r} is installed",
        where="environment.id",
        remedy=did_you_mean(str(name), environment_ids()),
    )


def _load(reference: str) -> Factory:
    module, _, function = reference.partition(":")
    try:
        factory: Factory = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise RequestError(
            f"cannot load the environment factory {reference!r}: {error}",
            where="environment",
            remedy="name it as module:function and install the package that has it",
        ) from None
    return factory


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """The nearest valid name when there is one, else all of them."""
    choices = sorted(valid)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"one of: {', '.join(choices)}"
