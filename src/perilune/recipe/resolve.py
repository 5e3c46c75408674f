"""Validates the sections of a recipe with the models of their owners, and orders the stages."""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from perilune.bundle.job import OutputKind
from perilune.bundle.plugin import (
    by_model_fields,
    code_fields,
    consumed_fields,
    environment_fields,
    file_fields,
    load_plugin,
    path_fields,
    plugin_names,
)
from perilune.data.sources import find_source
from perilune.errors import RequestError
from perilune.extensions import is_file_reference
from perilune.files import get_field, replace_field
from perilune.recipe.aliases import TASKS
from perilune.recipe.model_files import find_model, read_chat_template
from perilune.recipe.problems import Problem, ProblemsError, nearest, raise_first, validate
from perilune.recipe.reward_files import read_code, read_terms, with_code, with_source
from perilune.recipe.schema import (
    MODEL,
    VERIFIER,
    ModelSpec,
    Recipe,
    RewardFunction,
    Stage,
    with_rewards,
)
from perilune.recipe.source import Document, KeyPath
from perilune.recipe.tokenizers import with_tokenizer

_BLANK_STAGE = {"name": "blank", "task": "blank"}


def resolve(document: Document, folder: Path) -> Recipe:
    """Validate a document and sort its stages so that each follows the stages it consumes.

    Args:
        folder: base of relative paths in the document.

    Raises:
        RequestError: with the first error by position in the file, and the number of the others.
    """
    problems: list[Problem] = []
    recipe: Recipe | None = None
    value = dict(document.value)
    base = partial(_base, document, folder=folder)
    find = partial(_environment, base=base)
    stages = partial(_stages, base=base, environment=lambda: value.get("environment"))
    for section, check, blank in (("environment", find, {}), ("stages", stages, [_BLANK_STAGE])):
        if section in value:
            try:
                value[section] = check(value[section])
            except ProblemsError as found:
                problems += found.problems
                value[section] = blank  # a valid value, so that the rest is checked too
    try:
        recipe = validate(Recipe, value, (), "")
        located = {
            "model": recipe.model and _located(recipe.model, document, folder),
            "rewards": _rewards(recipe, document, folder),
        }
        recipe = recipe.model_copy(update=located)
        recipe = recipe if problems else with_tokenizer(recipe)
    except ProblemsError as found:
        problems += found.problems
    if problems or recipe is None:
        raise_first(sorted(problems, key=lambda p: _order(document.place(p.path))), document.place)
    return recipe


def environment_registry() -> Any:
    """The registry of environments.

    Imported by name, because the control plane imports this module and must not depend on environments.
    """
    return import_module("perilune.environments.core.registry")


def _order(place: str) -> tuple[bool, int, str]:
    """Sort key of a place: overrides first, then by line."""
    line = place.rpartition(":")[2]
    return (not place.startswith("--set"), int(line) if line.isdigit() else 0, place)


def _located(model: ModelSpec, document: Document, folder: Path) -> ModelSpec:
    """The model with absolute paths. Paths from `--set` are relative to the working directory."""
    found: dict[str, str] = {}
    if model.path is not None:
        found["path"] = str(find_model(model.path, _base(document, ("model", "path"), folder)))
    if model.chat_template is not None:
        base = _base(document, ("model", "chat_template"), folder)
        found["chat_template"] = read_chat_template(model.chat_template, base)
    return model.model_copy(update=found)


def _rewards(recipe: Recipe, document: Document, folder: Path) -> dict[str, float | RewardFunction]:
    """The rewards with the source text of their functions."""
    if isinstance(recipe.rewards.get(VERIFIER), RewardFunction):
        what = f"rewards.{VERIFIER} is the environment's own verifier; give a weight, or rename the function"
        raise ProblemsError([Problem(("rewards", VERIFIER), what)])
    found = {
        name: with_source(name, term, _base(document, ("rewards", name, "function"), folder))
        if isinstance(term, RewardFunction)
        else term
        for name, term in recipe.rewards.items()
    }
    if not recipe.environment:  # empty if it was invalid, which is reported already
        return found
    if not found:
        _require_verdicts(recipe)
        return found
    try:
        environment_registry().make_environment(with_rewards(recipe.environment, found))
    except RequestError as error:
        raise ProblemsError([Problem(("rewards",), f"rewards: {error.what}", error.remedy)]) from None
    return found


def _require_verdicts(recipe: Recipe) -> None:
    """Refuse environments without a verifier if no rewards are given."""
    sections: list[tuple[KeyPath, Mapping[str, Any]]] = [(("environment",), recipe.environment)]
    sections += [(("stages", n, "environment"), stage.environment) for n, stage in enumerate(recipe.stages)]
    registry = environment_registry()
    for place, whole in sections:
        parts = {
            (*place, *registry.part_place(whole, name)): part
            for name, part in registry.part_sections(whole).items()
        }
        for path, section in (parts or {place: whole}).items():
            if not section or section.get(registry.REWARDS) or registry.has_verdict(section):
                continue
            key = ".".join(map(str, path))
            what = f"{key}.match is null and no rewards are given, so nothing is scored"
            remedy = "add a reward function to rewards, or set match"
            raise ProblemsError([Problem((*path, "match"), what, remedy)])


def _base(document: Document, path: KeyPath, folder: Path) -> Path:
    """The base of a relative path at `path`: the recipe's folder, or the working directory for `--set`."""
    return Path.cwd() if document.place(path).startswith("--set") else folder


def _environment(
    value: Any, base: Callable[[KeyPath], Path], where: KeyPath = ("environment",), label: str = "environment"
) -> dict[str, Any]:
    """Validate the section with the environment's model, then by constructing the environment."""
    if not isinstance(value, dict):
        raise ProblemsError([Problem(where, f"{label} must be a section with keys")])
    registry = environment_registry()
    if is_file_reference(value.get("id")) and registry.SOURCE not in value:
        key = (*where, "id")
        value = {**value, registry.SOURCE: read_code(value["id"], base(key), key)}
    checked: dict[str, Any] = value
    try:
        source = value.get(registry.SOURCE)
        if registry.is_known(value) and (model := registry.environment_spec(value["id"], source)) is not None:
            of_file = {key: value[key] for key in ("id", registry.SOURCE) if is_file_reference(value["id"])}
            fields = {key: field for key, field in value.items() if key not in of_file}
            checked = validate(model, fields, where, label).model_dump(mode="json") | of_file
            if value["id"] == registry.MIXTURE:
                checked["parts"] = {
                    name: _part(part, base, (*where, "parts", name), f"{label}.parts.{name}")
                    for name, part in checked["parts"].items()
                }
            if registry.borrows(value):
                inner = (*where, registry.TASKS)
                checked[registry.TASKS] = _part(
                    checked[registry.TASKS], base, inner, ".".join(map(str, inner))
                )
            checked = registry.with_absolute_paths(checked, lambda key: base((*where, *key.split("."))))
        registry.make_environment(checked)
    except RequestError as error:
        section, *keys = error.where.split(".")
        own = section.startswith("environment")
        what = error.what if own or not error.where else f"{error.where}: {error.what}"
        path = (*where, *keys) if own else where
        named = ".".join((label, *keys)) if own else label
        raise ProblemsError([Problem(path, f"{named}: {what}", error.remedy)]) from None
    return checked


def _part(
    part: dict[str, Any], base: Callable[[KeyPath], Path], where: KeyPath, label: str
) -> dict[str, Any]:
    """Validate a part of a mixture: an environment section with keys of its own and, possibly, rewards."""
    registry = environment_registry()
    if part["id"] == registry.MIXTURE:
        remedy = "list its parts in the outer mixture"
        raise ProblemsError([Problem((*where, "id"), f"{label}: a part cannot be a mixture", remedy)])
    apart = {key: part[key] for key in (*registry.PART_KEYS, registry.REWARDS) if key in part}
    if terms := apart.get(registry.REWARDS):
        apart[registry.REWARDS] = read_terms(terms, base, (*where, registry.REWARDS))
    section = {key: value for key, value in part.items() if key not in apart}
    checked = _environment(section, base, where, label)
    return {key: value for key, value in checked.items() if key in part or key != "episodes"} | apart


def _stages(
    value: Any, base: Callable[[KeyPath], Path], environment: Callable[[], Any]
) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ProblemsError([Problem(("stages",), "stages must be a list")])
    problems: list[Problem] = []
    stages: list[Stage] = []
    positions: dict[str, int] = {}
    for index, item in enumerate(value):
        path = ("stages", index)
        try:
            stage = _stage(item, path, base, environment())
        except ProblemsError as found:
            problems += found.problems
            continue
        if stage.name in positions:
            problems.append(Problem((*path, "name"), f"two stages have the name '{stage.name}'"))
        elif stage.name in Recipe.model_fields:
            problems.append(
                Problem(
                    (*path, "name"), f"'{stage.name}' is a key of recipes, so a stage cannot have this name"
                )
            )
        else:
            positions[stage.name] = index
            stages.append(stage)
    if not problems:
        problems = [problem for stage in stages for problem in _links(stage, stages, positions)]
    if problems:
        raise ProblemsError(problems)
    return [stage.model_dump() for stage in _ordered(stages, positions)]


def _stage(item: Any, path: KeyPath, base: Callable[[KeyPath], Path], environment: Any) -> Stage:
    if not isinstance(item, dict):
        raise ProblemsError([Problem(path, "a stage is a mapping with at least name and task")])
    label = f"stages.{item.get('name', path[-1])}"
    header = {key: item[key] for key in ("name", "task", "environment") if key in item}
    stage = validate(Stage, header, path, label)
    try:
        spec = load_plugin(stage.task).spec
    except RequestError as error:
        remedy = TASKS.get(stage.task) or nearest(stage.task, plugin_names())
        raise ProblemsError([Problem((*path, "task"), f"{label}.task: {error.what}", remedy)]) from None
    own = {key: value for key, value in item.items() if key not in header}
    own = with_code(own, code_fields(spec), base, path)
    fields = validate(spec, own, path, label).model_dump(mode="json")
    fields |= dict.fromkeys(name for name in by_model_fields(spec) if name not in own)
    for field in path_fields(spec):
        fields[field] = _absolute(fields[field], base((*path, field)))
    files = file_fields(spec, fields)
    for field, name in files.items():
        fields[field] = _data(name, base((*path, field)), (*path, field), f"{label}.{field}")
    consumes = {
        field: fields[field]
        for field in consumed_fields(spec)
        if fields[field] is not None and field not in files
    }
    section = _changed(stage.environment, environment, base, (*path, "environment"), label)
    for field in environment_fields(spec):
        for name, keys in (get_field(fields, field) or {}).items():
            key = f"{field}.{name}"
            whole = _changed(keys, section or environment, base, (*path, *key.split(".")), label)
            fields = replace_field(fields, key, whole or keys)
    return stage.model_copy(update={"spec": fields, "consumes": consumes, "environment": section})


def _data(name: str, base: Path, path: KeyPath, key: str) -> str:
    """The absolute path of the user's own data."""
    try:
        return str(find_source((base / Path(name).expanduser()).absolute()))
    except RequestError as error:
        raise ProblemsError([Problem(path, f"{key}: {error.where}: {error.what}", error.remedy)]) from None


def _changed(
    keys: dict[str, Any], environment: Any, base: Callable[[KeyPath], Path], path: KeyPath, label: str
) -> dict[str, Any]:
    """The whole section that `keys` make of `environment`; empty without keys or a valid environment."""
    if not keys or not (environment or "id" in keys):
        return {}
    whole = ({} if "id" in keys else environment) | keys
    return _environment(whole, base, path, ".".join((label, *map(str, path[2:]))))


def _absolute(name: str | None, base: Path) -> str | None:
    """A file or folder as an absolute path; a URL unchanged."""
    if name is None or "://" in name or "@" in name.partition("/")[0]:
        return name
    return str((base / Path(name).expanduser()).absolute())


def _links(stage: Stage, stages: list[Stage], positions: dict[str, int]) -> list[Problem]:
    """The errors in the references from `stage` to other stages."""
    makes: dict[str, OutputKind] = {MODEL: "checkpoint"}
    makes |= {other.name: load_plugin(other.task).produces for other in stages if other is not stage}
    wanted = consumed_fields(load_plugin(stage.task).spec)
    problems = []
    for field, source in stage.consumes.items():
        path = ("stages", positions[stage.name], field)
        kind = wanted[field]
        fitting = [name for name, made in makes.items() if made == kind]
        key = f"stages.{stage.name}.{field}"
        choices = (
            f"one of: {', '.join(fitting)}" if fitting else f"add a stage that makes {with_article(kind)}"
        )
        if source == stage.name:
            problems.append(Problem(path, f"{key}: a stage cannot consume itself", choices))
        elif source not in makes:
            what = f"{key} takes the output of a stage, and no stage is named '{source}'"
            remedy = nearest(source, fitting) if fitting else choices
            if file_fields(load_plugin(stage.task).spec, {field: f"./{source}"}):
                remedy += f"; a file or folder of your own is ./{source}"
            problems.append(Problem(path, what, remedy))
        elif makes[source] != kind:
            what = f"{key} needs a stage that makes {with_article(kind)}, and '{source}' makes"
            what = f"{what} {with_article(makes[source])}"
            problems.append(Problem(path, what, choices))
    return problems


_WORDS = {"preferences": "preference pairs", "reward_model": "a reward model", "utterances": "utterances"}


def with_article(kind: str) -> str:
    """An output kind as words: "a dataset", "preference pairs"."""
    return _WORDS.get(kind, f"a {kind}")


def _ordered(stages: list[Stage], positions: dict[str, int]) -> list[Stage]:
    """The stages in the written order, except that each follows the stages it consumes.

    Raises:
        ProblemsError: when stages consume each other in a circle.
    """
    ready: list[Stage] = []
    done = {MODEL}
    waiting = list(stages)
    while waiting:
        free = next((stage for stage in waiting if done.issuperset(stage.consumes.values())), None)
        if free is None:
            circle = _circle(waiting)
            what = f"stages consume each other in a circle: {' <- '.join(circle)}"
            raise ProblemsError([Problem(("stages", positions[circle[0]]), what)])
        waiting.remove(free)
        ready.append(free)
        done.add(free.name)
    return ready


def _circle(waiting: list[Stage]) -> list[str]:
    """The names along a circle among stages that all wait for each other."""
    needs = {stage.name: stage.consumes.values() for stage in waiting}
    walk = [waiting[0].name]
    while walk.count(walk[-1]) == 1:
        walk.append(next(name for name in needs[walk[-1]] if name in needs))
    return walk[walk.index(walk[-1]) :]
