"""Environments by id: ours, and any that a package offers as an entry point of `perilune.environments`.

An entry point is a class whose instances speak the Environment protocol. Its attribute `Spec`, a frozen
pydantic model with the field `id`, says what the environment section of a recipe may hold, and the class
takes one checked instance of it. A callable without `Spec` takes the section as it is.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from perilune.environments.core.episode_settings import (
    KEY,
    EpisodeSettings,
    episode_settings,
    with_episode_settings,
    without_episode_settings,
)
from perilune.environments.core.protocol import Environment
from perilune.errors import RequestError
from perilune.files import with_field

ENVIRONMENT_GROUP = "perilune.environments"
FACTORY_ID = "factory"
REWARDS = "rewards"  # of any section: names and weights, as `perilune.environments.core.rewards` has them

_BUILT_IN = {
    "calculator": "perilune.environments.builtin.calculator:CalculatorEnvironment",
    "gymnasium": "perilune.environments.adapters.gymnasium_text:GymnasiumEnvironment",
    "jsonl": "perilune.environments.builtin.jsonl:JsonlEnvironment",
    "open_spiel": "perilune.games.open_spiel:OpenSpielEnvironment",
    "openenv": "perilune.environments.adapters.openenv:OpenEnvEnvironment",
    "planning": "perilune.environments.builtin.planning:PlanningEnvironment",
    "planning_repair": "perilune.environments.builtin.planning:PlanningRepairEnvironment",
    "reasoning_gym": "perilune.environments.adapters.reasoning_gym:ReasoningGymEnvironment",
    "textarena": "perilune.environments.adapters.textarena:TextArenaEnvironment",
    "tools": "perilune.environments.builtin.tools:ToolsEnvironment",
    "verifiers": "perilune.environments.adapters.verifiers_package:VerifiersEnvironment",
}


def environment_ids() -> tuple[str, ...]:
    """Ids that a recipe's `environment.id` may name, sorted."""
    return tuple(sorted(_factories()))


def environment_spec(name: str) -> type[BaseModel] | None:
    """Model of the section of the environment `name`, settings of episodes included; None when it shows none.

    Raises:
        RequestError: when no such environment is installed.
    """
    if name == FACTORY_ID:
        return None
    model: type[BaseModel] | None = getattr(_factory({"id": name}), "Spec", None)
    return None if model is None else with_episode_settings(model)


def family_field(name: str) -> str:
    """The field that says which family of the environment `name` is meant: "task", "game" or another.

    Raises:
        RequestError: when no such environment is installed.
    """
    return "task" if name == FACTORY_ID else str(getattr(_factory({"id": name}), "family_field", "task"))


def environment_families(name: str) -> tuple[str, ...]:
    """Families of tasks, or games, that the environment `name` can be asked for by `family_field`.

    Raises:
        RequestError: when no such environment, or not the package that it is about, is installed.
    """
    if name == FACTORY_ID:
        return ()
    families: tuple[str, ...] = getattr(_factory({"id": name}), "families", tuple)()
    return families


def environment_notes(name: str) -> dict[str, dict[str, str]]:
    """What else the environment `name` has to say of itself: under each heading, a line by name.

    Raises:
        RequestError: when no such environment is installed.
    """
    if name == FACTORY_ID:
        return {}
    notes: dict[str, dict[str, str]] = getattr(_factory({"id": name}), "notes", dict)()
    return notes


def file_fields(section: Mapping[str, Any]) -> dict[str, str]:
    """Fields of an environment section that name files, dotted where they are nested, and their paths.

    The environment's class lists such fields as `files`; a bundle has to hold what they name.
    """
    found: dict[str, str] = {}
    for key in getattr(_factory(section), "files", ()) if section.get("id") in _factories() else ():
        value: Any = section
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, str):
            found[key] = value
    return found


def with_absolute_paths(section: Mapping[str, Any], base: Callable[[str], Path]) -> dict[str, Any]:
    """The section with absolute paths; `base` says what the one in a field is relative to."""
    found = dict(section)
    for key, path in file_fields(section).items():
        found = with_field(found, key, str((base(key) / Path(path).expanduser()).absolute()))
    return found


def has_verdict(section: Mapping[str, Any]) -> bool:
    """Whether the environment judges answers itself; where it does not, reward functions have to."""
    asked = getattr(_factory(section), "has_verdict", None)
    return asked is None or bool(asked(section))


def make_environment(spec: Mapping[str, Any], *, checked: bool = True) -> Environment:
    """Build the environment that `spec` describes: its `id`, and the fields that this id takes.

    Args:
        checked: whether to look at what only handing out tasks needs, such as files of questions.

    What the section says of episodes (`EpisodeSettings`) is checked here, and heeded by who plays them.

    `{"id": "factory", "factory": "module:function", ...}` calls a function that is not installed as an
    entry point, for tests and notebooks. `rewards` lays terms and functions by name and weight over it.

    Raises:
        RequestError: when the id is missing or unknown, or a field is unknown, missing or impossible.
    """
    factory = _factory(spec)
    model: type[BaseModel] | None = getattr(factory, "Spec", None)
    own = {name: value for name, value in without_episode_settings(spec).items() if name != REWARDS}
    try:
        settings = episode_settings(spec)
    except ValidationError as error:
        raise _explained(error, EpisodeSettings, f"{KEY}.") from None
    try:
        environment: Environment = factory(model.model_validate(own) if model else own)
    except ValidationError as error:
        if model is None:
            raise
        raise _explained(error, model) from None
    if checked and hasattr(environment, "check_files"):
        environment.check_files()
    for bound in ("max_turns", "max_tokens"):
        if getattr(settings, bound) is not None and getattr(environment, "max_turns", 1) == 1:
            raise RequestError(
                "bounds episodes of several turns, and this environment has one",
                where=f"environment.{KEY}.{bound}",
                remedy="leave it out; max_tokens of a stage bounds an answer",
            )
    if spec.get(REWARDS):
        from perilune.environments.core.rewards import WeightedRewards

        return WeightedRewards(environment, spec[REWARDS])
    return environment


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """The nearest valid name when there is one, else all of them."""
    choices = sorted(valid)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"one of: {', '.join(choices)}"


@cache
def _factories() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=ENVIRONMENT_GROUP)} | _BUILT_IN


def _factory(spec: Mapping[str, Any]) -> Any:
    name = spec.get("id")
    if name == FACTORY_ID:
        reference = spec.get("factory")
        if not isinstance(reference, str) or not re.fullmatch(r"[^:]+:[^:]+", reference):
            raise RequestError(
                "the environment 'factory' needs the function that makes it",
                where="environment.factory",
                remedy="factory: module:function, of an installed package or one on PYTHONPATH",
            )
        return _load(reference)
    if not isinstance(name, str) or name not in _factories():
        raise RequestError(
            f"no environment called {name!r} is installed",
            where="environment.id",
            remedy=did_you_mean(str(name or "")[:80], environment_ids()),
        )
    return _load(_factories()[name])


def _load(reference: str) -> Any:
    module, _, function = reference.partition(":")
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise RequestError(
            f"cannot load the environment {reference!r}: {error}",
            where="environment",
            remedy="name it as module:function and install the package that has it",
        ) from None


def _explained(error: ValidationError, model: type[BaseModel], prefix: str = "") -> RequestError:
    first = error.errors()[0]
    key = prefix + ".".join(map(str, first["loc"]))
    where = f"environment.{key}" if key else "environment"
    if first["type"] == "extra_forbidden":
        return RequestError(
            f"no field '{key}'",
            where=where,
            remedy=did_you_mean(key.removeprefix(prefix), model.model_fields),
        )
    return RequestError(f"{key}: {first['msg']}", where=where)
