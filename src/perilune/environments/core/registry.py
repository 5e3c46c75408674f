"""Builds environments by id: the built-in ones, and those that packages register as entry points.

An entry point in the group `perilune.environments` is a class that implements the Environment protocol. Its
attribute `Spec`, a frozen pydantic model with the field `id`, describes the environment section of a recipe,
and the constructor takes one validated instance of it. A callable without `Spec` takes the section as a
mapping.

The id file.py:name is such a class in a file, whose text is the section's field `source`. Its fields are
those of `Spec` without `id`.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, create_model

from perilune.environments.core import managed_context, prompting
from perilune.environments.core.episode_settings import EPISODES_KEY, EpisodeSettings
from perilune.environments.core.managed_context import ContextSettings, ManagedContext
from perilune.environments.core.own_tasks import wrap_user_tasks
from perilune.environments.core.prompted_environment import PromptedEnvironment
from perilune.environments.core.prompting import PromptingSettings
from perilune.environments.core.protocol import Environment
from perilune.environments.core.rewards import WeightedRewards
from perilune.environments.core.tasks_section import TasksSection
from perilune.errors import RequestError, did_you_mean
from perilune.extensions import is_file_reference, load_extension
from perilune.files import get_field, replace_field

ENVIRONMENT_GROUP = "perilune.environments"
FACTORY_ID = "factory"
MIXTURE = "mixture"  # id of the environment whose parts are environments
PROGRAM, TASKS = "program", "tasks"
PART_KEYS = ("weight", "reward_scale")  # keys of a part of a mixture besides those of its environment
SOURCE = "source"  # field with the text of the file that `id` names
REWARDS = "rewards"  # key of every section; see `perilune.environments.core.rewards`

_BUILT_IN = {
    "calculator": "perilune.environments.builtin.calculator:CalculatorEnvironment",
    "facts": "perilune.environments.search.facts.environment:FactsEnvironment",
    "gymnasium": "perilune.environments.adapters.gymnasium_text:GymnasiumEnvironment",
    "judge": "perilune.environments.builtin.judge:JudgeEnvironment",
    "instructions": "perilune.environments.builtin.instructions.environment:InstructionsEnvironment",
    "jsonl": "perilune.environments.builtin.jsonl:JsonlEnvironment",
    "oolong": "perilune.environments.builtin.oolong.environment:OolongEnvironment",
    "open_spiel": "perilune.games.open_spiel:OpenSpielEnvironment",
    "mcp": "perilune.environments.program.mcp:McpEnvironment",
    MIXTURE: "perilune.environments.core.mixture:Mixture",
    "openenv": "perilune.environments.adapters.openenv:OpenEnvEnvironment",
    "planning": "perilune.environments.builtin.planning.environment:PlanningEnvironment",
    PROGRAM: "perilune.environments.program.environment:ProgramEnvironment",
    "planning_repair": "perilune.environments.builtin.planning.environment:PlanningRepairEnvironment",
    "recursive": "perilune.environments.interpreter.recursive:RecursiveEnvironment",
    "reasoning_gym": "perilune.environments.adapters.reasoning_gym:ReasoningGymEnvironment",
    "search": "perilune.environments.search.environment:SearchEnvironment",
    "suite": "perilune.traces.environment:SuiteEnvironment",
    "textarena": "perilune.environments.adapters.textarena:TextArenaEnvironment",
    "tools": "perilune.environments.builtin.tools:ToolsEnvironment",
    "verifiers": "perilune.environments.adapters.verifiers_package:VerifiersEnvironment",
    "wide_lookup": "perilune.environments.builtin.wide_lookup.environment:WideLookupEnvironment",
}


def environment_ids() -> tuple[str, ...]:
    """Return all valid values of a recipe's `environment.id`, sorted."""
    return tuple(sorted(_list_factories()))


def environment_spec(name: str, source: str | None = None) -> type[BaseModel] | None:
    """Return the model of an environment's section, with `episodes` and `prompting`; None if it has none.

    Args:
        source: text of the file, for the id file.py:name.

    Raises:
        RequestError: if the environment is not installed, or its file cannot be loaded.
    """
    if name == FACTORY_ID:
        return None
    model: type[BaseModel] | None = getattr(_find_factory({"id": name, SOURCE: source}), "Spec", None)
    return None if model is None else _extend_model(model)


def is_known_environment(section: Mapping[str, Any]) -> bool:
    """Return whether the section names an installed environment, or one of a file."""
    name = section.get("id")
    return isinstance(name, str) and (name in _list_factories() or is_file_reference(name))


def family_field(name: str) -> str:
    """Return the field that selects the task family of an environment: "task", "game" or another.

    Raises:
        RequestError: if the environment is not installed.
    """
    return str(_declared(name, "family_field", "task"))


def environment_families(name: str) -> tuple[str, ...]:
    """Return the task families or games of an environment, as values of `family_field`.

    Raises:
        RequestError: if the environment or the package that it adapts is not installed.
    """
    families: tuple[str, ...] = _declared(name, "families", tuple)()
    return families


def environment_summary(name: str) -> str:
    """Return one line about an environment, from its module's docstring.

    Raises:
        RequestError: if the environment is not installed.
    """
    module = sys.modules[_find_factory({"id": name}).__module__]
    line = (module.__doc__ or "").partition("\n")[0].removeprefix(f"The environment `{name}`: ")
    return line[:1].upper() + line[1:]


def environment_notes(name: str) -> dict[str, dict[str, str]]:
    """Return further facts about an environment: for each heading, one line per name.

    Raises:
        RequestError: if the environment is not installed.
    """
    notes: dict[str, dict[str, str]] = _declared(name, "notes", dict)()
    return notes


def _declared(name: str, attribute: str, default: Any) -> Any:
    """Return what the class of an installed environment declares; `default` for a factory or a file."""
    if name == FACTORY_ID or is_file_reference(name):
        return default
    return getattr(_find_factory({"id": name}), attribute, default)


def file_fields(section: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of an environment section that name files, and their paths. Nested fields are dotted.

    The environment's class lists these fields as `files`. A bundle includes the files that they name.
    """
    paths: dict[str, str] = {}
    for key in getattr(_find_factory(section), "files", ()) if is_known_environment(section) else ():
        value = get_field(section, key)
        if isinstance(value, str):
            paths[key] = value
    for name, part in part_sections(section).items():
        path_of_part = ".".join(part_path(section, name))
        paths |= {f"{path_of_part}.{key}": path for key, path in file_fields(part).items()}
    return paths


def part_sections(section: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections of a mixture's parts by name, or of borrowed tasks, or none.

    A part without `rewards` or `prompting` has those of the whole.
    """
    parts = section.get("parts") if section.get("id") == MIXTURE else None
    if has_borrowed_tasks(section):
        parts = {TASKS: section.get(TASKS)}
    shared = {key: section[key] for key in (REWARDS, prompting.PROMPTING_KEY) if section.get(key)}
    sections = {}
    for name, part in parts.items() if isinstance(parts, Mapping) else ():
        if isinstance(part, Mapping):
            own = {key: value for key, value in part.items() if key not in PART_KEYS}
            sections[str(name)] = own | {key: value for key, value in shared.items() if not own.get(key)}
    return sections


def part_path(section: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the path of the part `name` in the section."""
    return ("parts", name) if section.get("id") == MIXTURE else (name,)


def has_borrowed_tasks(section: Mapping[str, Any]) -> bool:
    """Return whether the tasks are those of the environment in the field `tasks`, a `TasksSection`."""
    if not is_known_environment(section):
        return False
    model: type[BaseModel] | None = _declared(section["id"], "Spec", None)
    field = model.model_fields.get(TASKS) if model else None
    return field is not None and field.annotation is TasksSection


def scoring_sections(section: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the sections of the environments that score answers: of the parts, or the section itself."""
    is_judge = getattr(_find_factory(section), "is_judge", False)
    return (section,) if is_judge else tuple(part_sections(section).values()) or (section,)


def with_absolute_paths(section: Mapping[str, Any], base: Callable[[str], Path]) -> dict[str, Any]:
    """Make paths in the section absolute. `base` returns the folder of the path in a field."""
    absolute = dict(section)
    for key, path in file_fields(section).items():
        absolute = replace_field(absolute, key, str((base(key) / Path(path).expanduser()).absolute()))
    return absolute


def has_verdict(section: Mapping[str, Any]) -> bool:
    """Return whether the environment scores answers itself. Otherwise `rewards` needs functions."""
    declared = getattr(_find_factory(section), "has_verdict", None)
    return declared is None or bool(declared(section))


def require_section(spec: object) -> None:
    """Check that `spec` is a section of keys, and not for example an id alone.

    Raises:
        RequestError: when it is not.
    """
    if not isinstance(spec, Mapping):
        example = spec if isinstance(spec, str) else "calculator"
        raise RequestError(
            f"{spec!r} is not a section of keys", where="environment", remedy=f"{{'id': {example!r}}}"
        )


def make_environment(spec: Mapping[str, Any], *, checked: bool = True) -> Environment:
    """Build the environment that `spec` describes: its `id` and the fields of that id.

    `{"id": "factory", "factory": "module:function", ...}` calls a function that is not registered as an entry
    point, for tests and notebooks. `rewards` replaces the reward by a weighted sum of terms and functions.
    `episodes` (`EpisodeSettings`) is validated here and applied by the rollout worker. `prompting`
    (`PromptingSettings`) is the prompt of a pretrained model.

    Args:
        checked: whether to check files that only `tasks` needs.

    Raises:
        RequestError: if the id is missing or unknown, or a field is unknown, missing or invalid.
    """
    require_section(spec)
    factory = _find_factory(spec)
    model: type[BaseModel] | None = getattr(factory, "Spec", None)
    shared = (REWARDS, EPISODES_KEY, prompting.PROMPTING_KEY, managed_context.CONTEXT_KEY)
    excluded = (*shared, *(("id", SOURCE) if is_file_reference(spec.get("id")) else ()))
    fields = {name: value for name, value in spec.items() if name not in excluded}
    settings = _parse_shared_section(EpisodeSettings, EPISODES_KEY, spec)
    try:
        validated = model.model_validate(fields) if model else fields
        parts = part_sections(spec)
        environment: Environment = factory(validated, parts) if parts else factory(validated)
    except ValidationError as error:
        if model is None:
            raise
        raise section_error(error, model, "environment") from None
    except Exception as error:
        if not is_file_reference(spec.get("id")):
            raise
        raise _construction_error(spec["id"], factory, error) from None
    if is_file_reference(spec.get("id")):
        _require_protocol(environment, spec["id"])
        if hasattr(environment, "__dict__"):
            vars(environment)["tasks"] = wrap_user_tasks(environment.tasks, spec["id"])
    if checked and hasattr(environment, "check_files"):
        environment.check_files()
    for bound in ("max_turns", "max_tokens"):
        if getattr(settings, bound) is not None and getattr(environment, "max_turns", 1) == 1:
            raise RequestError(
                "applies to multi-turn environments, and this one has a single turn",
                where=f"environment.{EPISODES_KEY}.{bound}",
                remedy="remove it; the stage's max_tokens limits the answer",
            )
    return _apply_sections(environment, spec)


def _apply_sections(environment: Environment, spec: Mapping[str, Any]) -> Environment:
    """Apply the sections that every environment accepts. Parts have their own rewards and prompting."""
    has_parts = bool(part_sections(spec))
    if spec.get(prompting.PROMPTING_KEY) and not has_parts:
        prompting_settings = _parse_shared_section(PromptingSettings, prompting.PROMPTING_KEY, spec)
        environment = PromptedEnvironment(environment, prompting_settings)
    if spec.get(managed_context.CONTEXT_KEY):
        if spec.get("id") == MIXTURE:
            raise RequestError("belongs to a part", where="environment.context", remedy="set it in each part")
        context_settings = _parse_shared_section(ContextSettings, managed_context.CONTEXT_KEY, spec)
        environment = ManagedContext(environment, context_settings)
    if spec.get(REWARDS) and getattr(environment, "is_judge", False):
        what = "the judge's grade is the reward, so the terms in `rewards` would have no effect"
        raise RequestError(what, where=REWARDS, remedy="remove it, or write it in environment.tasks")
    if spec.get(REWARDS) and not has_parts:
        return WeightedRewards(environment, spec[REWARDS])
    return environment


def _construction_error(name: str, factory: Any, error: Exception) -> RequestError:
    if lacking := getattr(factory, "__abstractmethods__", None):
        return _protocol_error(name, sorted(lacking))
    return RequestError(
        f"cannot make {name}: {type(error).__name__}: {error}",
        where="environment.id",
        remedy="its __init__ takes one argument: the environment section, or the Spec made of it",
    )


def _require_protocol(environment: Any, name: str) -> None:
    """Check that the object of a user's file is an environment."""
    lacking = [method for method in ("tasks", "score") if not callable(getattr(environment, method, None))]
    lacking += [] if isinstance(getattr(environment, "id", None), str) else ["id"]
    if lacking:
        raise _protocol_error(name, lacking)
    for bound in ("max_turns", "players"):
        if not isinstance(value := getattr(environment, bound, 1), int) or value < 1:
            raise RequestError(
                f"{bound} of {name} is {value!r}", where="environment.id", remedy="a whole number, at least 1"
            )


def _protocol_error(name: str, lacking: Sequence[str]) -> RequestError:
    return RequestError(
        f"{name} is not an environment: it has no {', '.join(lacking)}",
        where="environment.id",
        remedy="define it in the class, which derives from perilune.environments.SingleTurn or MultiTurn",
    )


Settings = TypeVar("Settings", bound=BaseModel)


def _parse_shared_section(model: type[Settings], key: str, spec: Mapping[str, Any]) -> Settings:
    """Return the settings in a section that every environment accepts."""
    try:
        return model.model_validate(spec.get(key) or {})
    except ValidationError as error:
        raise section_error(error, model, "environment", f"{key}.") from None


@cache
def _extend_model(model: type[BaseModel]) -> type[BaseModel]:
    """Extend the model of a section by the sections that every environment accepts."""
    episodes_field = Field(
        default_factory=EpisodeSettings, description="bounds of an episode and policy for failures"
    )
    prompting_field = Field(None, description="prompt of a pretrained model, and how its answer is extracted")
    context_field = Field(
        None, description="what to remove from the policy's context in a long episode; null: nothing"
    )
    fields: dict[str, Any] = {
        EPISODES_KEY: (EpisodeSettings, episodes_field),
        managed_context.CONTEXT_KEY: (ContextSettings | None, context_field),
        prompting.PROMPTING_KEY: (PromptingSettings | None, prompting_field),
    }
    return create_model(model.__name__, __base__=model, __doc__=model.__doc__, **fields)


@cache
def _list_factories() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=ENVIRONMENT_GROUP)} | _BUILT_IN


def _find_factory(spec: Mapping[str, Any]) -> Any:
    name = spec.get("id")
    if is_file_reference(name):
        return load_extension(str(name), spec.get(SOURCE), ENVIRONMENT_GROUP, "environment.id")
    if name == FACTORY_ID:
        reference = spec.get("factory")
        if not isinstance(reference, str) or not re.fullmatch(r"[^:]+:[^:]+", reference):
            raise RequestError(
                "the environment 'factory' needs a factory function",
                where="environment.factory",
                remedy="set factory: module:function; the module must be installed or on PYTHONPATH",
            )
        if is_file_reference(reference):
            raise RequestError(
                f"{reference!r} is a file, not an installed module",
                where="environment.factory",
                remedy=f'name the file as the id, without factory: id: "{reference}"',
            )
        return _load_factory(reference)
    if not isinstance(name, str) or name not in _list_factories():
        puzzle = (
            f"reasoning_gym/{name}; in a recipe id: reasoning_gym, task: {name}"
            if name in environment_families("reasoning_gym")
            else ""
        )
        raise RequestError(
            "the id is missing" if name is None else f"no environment called {name!r} is installed",
            where="environment.id",
            remedy=puzzle or did_you_mean(str(name or "")[:80], environment_ids()),
        )
    return _load_factory(_list_factories()[name])


def _load_factory(reference: str) -> Any:
    module, _, function = reference.partition(":")
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise RequestError(
            f"cannot load the environment {reference!r}: {error}",
            where="environment",
            remedy="write module:function, and install the package that contains it",
        ) from None


def section_error(
    error: ValidationError, model: type[BaseModel], section: str, prefix: str = ""
) -> RequestError:
    """Return the first error of the `model` of a section, whose keys begin with `prefix`, with a remedy."""
    first = error.errors()[0]
    key = prefix + ".".join(map(str, first["loc"]))
    where = f"{section}.{key}" if key else section
    if first["type"] == "extra_forbidden":
        name = key.removeprefix(prefix)
        remedy = did_you_mean(name, model.model_fields)
        if remedy.startswith("one of") and "config" in model.model_fields:
            remedy = f"config.{name}, if it is a setting of the task; else {remedy}"
        return RequestError(f"no field '{key}'", where=where, remedy=remedy)
    if first["type"] == "missing":
        return RequestError(
            f"the field '{key}' is missing", where=where, remedy=_describe_field(model, first["loc"])
        )
    what = first["msg"].removeprefix("Value error, ")
    return RequestError(f"{key}: {what}" if key else what, where=where)


def _describe_field(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """Return the documentation of a field, as a remedy; empty for a field of an inner section."""
    field = model.model_fields.get(str(location[0])) if len(location) == 1 else None
    return f"set it: {field.description}" if field and field.description else ""
