"""Teachers by name: the built-in ones, and those of the entry-point group `perilune.teachers`.

An entry point is a class that implements the Teacher protocol. Its constructor takes the shares of the
strategies. Its attribute `strategies` maps each strategy to its default share. If it has a pydantic model as
the attribute `Options`, the constructor takes an instance of the model as second argument.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

import perilune
from perilune.data.generators.teacher import Teacher
from perilune.data.records import Provenance, settings_digest
from perilune.environments.core.registry import file_fields, section_error
from perilune.errors import RequestError, did_you_mean
from perilune.extensions import TEACHER_GROUP, CodeFile, is_file_reference, load_extension
from perilune.files import finite_number, replace_field, sha256_file

_BUILT_IN = {
    "arithmetic": "perilune.data.generators.arithmetic:ArithmeticTeacher",
    "calculator": "perilune.data.generators.calculator:CalculatorTeacher",
    "gold": "perilune.data.generators.gold:GoldTeacher",
    "oolong": "perilune.data.generators.oolong:OolongTeacher",
    "planning": "perilune.data.generators.planning:PlanningTeacher",
    "open_spiel": "perilune.data.generators.open_spiel:OpenSpielTeacher",
    "recursive": "perilune.data.generators.recursive:RecursiveTeacher",
    "search": "perilune.data.generators.search:SearchTeacher",
    "tools": "perilune.data.generators.tools:ToolsTeacher",
    "wide_lookup": "perilune.data.generators.wide_lookup:WideLookupTeacher",
}


def teacher_names() -> tuple[str, ...]:
    return tuple(sorted(_list_classes()))


def make_teacher(
    named: str | CodeFile,
    strategies: Mapping[str, float] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Teacher:
    """Return a teacher.

    Args:
        named: one of `teacher_names`, or a class in a file.
        strategies: share of the tasks that each strategy answers; by default the teacher's own.
        options: fields of the teacher's `Options` model.

    Raises:
        RequestError: when the name, a strategy or an option is unknown, the shares do not sum to 1, or the
            file has no teacher.
    """
    name = named if isinstance(named, str) else named.name
    teacher_class = _load_class(name, None if isinstance(named, str) else named.source)
    shares = _check_shares(name, strategies or {}, teacher_class.strategies)
    model: type[BaseModel] | None = getattr(teacher_class, "Options", None)
    if options and model is None:
        raise RequestError(f"the teacher '{name}' takes no options", where=f"options.{next(iter(options))}")
    arguments: list[BaseModel] = []
    if model:
        try:
            arguments = [model.model_validate(options or {})]
        except ValidationError as error:
            raise section_error(error, model, "options") from None
    teacher: Teacher = teacher_class(shares, *arguments)
    return teacher


def provenance_of(teacher: Teacher, section: Mapping[str, Any], **extra: Any) -> Provenance:
    """Return the provenance of all records of `teacher`.

    Args:
        section: the environment section; the provenance identifies its files by their content.
        extra: further settings of the teacher.
    """
    points = entry_points(group=TEACHER_GROUP, name=teacher.name)
    versions = [point.dist.version for point in points if point.dist and teacher.name not in _BUILT_IN]
    return Provenance(
        teacher.name,
        versions[0] if versions else perilune.__version__,
        settings_digest(
            environment=replace_paths_by_digests(section), shares=dict(teacher.shares), told=extra
        ),
    )


def replace_paths_by_digests(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an environment section with the SHA-256 of files in place of their paths."""
    for key, path in file_fields(section).items():
        files = sorted(Path(path).rglob("*.jsonl")) if Path(path).is_dir() else [Path(path)]
        section = replace_field(section, key, [sha256_file(file) for file in files])
    return section


def _load_class(name: str, source: str | None) -> Any:
    if is_file_reference(name):
        teacher_class = load_extension(name, source, TEACHER_GROUP, "teacher")
        if not isinstance(getattr(teacher_class, "strategies", None), Mapping) or not callable(
            getattr(teacher_class, "candidates", None)
        ):
            raise RequestError(
                f"{name} is not a teacher: it needs `strategies` and `candidates`",
                where="teacher",
                remedy="derive it from perilune.data.generators.ScriptedTeacher",
            )
        return teacher_class
    if name not in _list_classes():
        raise RequestError(
            f"no teacher is called '{name}'", where="teacher", remedy=did_you_mean(name, teacher_names())
        )
    module, _, attribute = _list_classes()[name].partition(":")
    return getattr(import_module(module), attribute)


@cache
def _list_classes() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=TEACHER_GROUP)} | _BUILT_IN


def _check_shares(name: str, given: Mapping[str, float], known: Mapping[str, float]) -> dict[str, float]:
    if not given:
        return {strategy: share for strategy, share in known.items() if share > 0}
    for strategy, share in given.items():
        if strategy not in known:
            what = f"the teacher '{name}' has no strategy '{strategy}'"
            raise RequestError(what, where=f"strategies.{strategy}", remedy=did_you_mean(strategy, known))
        if finite_number(share) is None:
            what = f"the share is {share!r}, not a number from 0 to 1"
            raise RequestError(what, where=f"strategies.{strategy}", remedy=f"{strategy}=0.5 is one half")
    if any(share < 0 for share in given.values()) or abs(sum(given.values()) - 1) > 1e-6:
        what = f"shares of strategies must be at least 0 and sum to 1; they sum to {sum(given.values()):g}"
        raise RequestError(what, where="strategies")
    return dict(given)
