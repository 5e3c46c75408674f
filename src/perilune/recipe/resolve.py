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
from perilune.recipe.aliases import TASK_REMEDIES
from perilune.recipe.model_files import find_model
from perilune.recipe.problems import Problem, ProblemsError, raise_problems, read_text, suggest_name, validate
from perilune.recipe.reward_files import (
    read_reward_sources,
    read_reward_terms,
    read_source,
    read_source_files,
)
from perilune.recipe.schema import (
    MODEL,
    VERIFIER,
    ModelSpec,
    Recipe,
    RewardFunction,
    Stage,
    add_rewards,
)
from perilune.recipe.source import Document, KeyPath
from perilune.recipe.tokenizers import choose_tokenizer

_BLANK_STAGE = {"name": "blank", "task": "blank"}


def resolve(document: Document, folder: Path) -> Recipe:
    """Validate a document and sort its stages so that each follows the stages it consumes.

    Args:
        folder: base of relative paths in the document.

    Raises:
        RequestError: with the first error by position in the file; the other errors are in `others`. If
            overrides have errors, only these are reported.
    """
    problems: list[Problem] = []
    recipe: Recipe | None = None
    value = dict(document.value)
    base = partial(_base_folder, document, folder=folder)
    find = partial(_validate_environment, base=base)
    stages = partial(_validate_stages, base=base, environment=lambda: value.get("environment"))
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
            "model": recipe.model and _resolve_model_paths(recipe.model, document, folder),
            "rewards": _load_rewards(recipe, document, folder),
        }
        recipe = recipe.model_copy(update=located)
        recipe = recipe if problems else choose_tokenizer(recipe)
    except ProblemsError as found:
        problems += found.problems
    if problems or recipe is None:
        problems.sort(key=lambda p: _sort_key(document.locate(p.path)))
        overridden = [p for p in problems if document.locate(p.path).startswith("--set")]
        raise_problems(overridden or problems, document.locate)
    return recipe


def import_environment_registry() -> Any:
    """Import by name, because the control plane imports this module and must not depend on environments."""
    return import_module("perilune.environments.core.registry")


def _sort_key(location: str) -> tuple[bool, int, str]:
    """Return the sort key of a location: overrides first, then by line."""
    line = location.rpartition(":")[2]
    return (not location.startswith("--set"), int(line) if line.isdigit() else 0, location)


def _resolve_model_paths(model: ModelSpec, document: Document, folder: Path) -> ModelSpec:
    """Make the paths of the model absolute. Paths from `--set` are relative to the working directory."""
    update: dict[str, str] = {}
    if model.path is not None:
        update["path"] = str(find_model(model.path, _base_folder(document, ("model", "path"), folder)))
    if model.chat_template is not None:
        key = ("model", "chat_template")
        file = _base_folder(document, key, folder) / Path(model.chat_template).expanduser()
        update["chat_template"] = read_text(file.absolute(), key)
    return model.model_copy(update=update)


def _load_rewards(recipe: Recipe, document: Document, folder: Path) -> dict[str, float | RewardFunction]:
    """Return the rewards with the source text of their functions."""
    if isinstance(recipe.rewards.get(VERIFIER), RewardFunction):
        what = f"rewards.{VERIFIER} is the environment's own verifier; give a weight, or rename the function"
        raise ProblemsError([Problem(("rewards", VERIFIER), what)])
    base = partial(_base_folder, document, folder=folder)
    rewards = read_reward_sources(recipe.rewards, base, ("rewards",))
    if not recipe.environment:  # empty if it was invalid, which is reported already
        return rewards
    if not rewards:
        _require_scoring(recipe)
        return rewards
    try:
        import_environment_registry().make_environment(add_rewards(recipe.environment, rewards))
    except RequestError as error:
        raise ProblemsError([Problem(("rewards",), f"rewards: {error.what}", error.remedy)]) from None
    return rewards


def _require_scoring(recipe: Recipe) -> None:
    """Refuse environments without a verifier if no rewards are given."""
    sections: list[tuple[KeyPath, Mapping[str, Any]]] = [(("environment",), recipe.environment)]
    sections += [(("stages", n, "environment"), stage.environment) for n, stage in enumerate(recipe.stages)]
    registry = import_environment_registry()
    for location, whole in sections:
        is_one = bool(whole) and whole in registry.scoring_sections(whole)  # a judge scores for its tasks
        sections_of = {} if is_one else registry.part_sections(whole)
        parts = {(*location, *registry.part_path(whole, name)): part for name, part in sections_of.items()}
        for path, section in (parts or {location: whole}).items():
            if not section or section.get(registry.REWARDS) or registry.has_verdict(section):
                continue
            key = ".".join(map(str, path))
            what = f"{key}.match is null and no rewards are given, so nothing is scored"
            remedy = "add a reward function to rewards, or set match"
            raise ProblemsError([Problem((*path, "match"), what, remedy)])


def _base_folder(document: Document, path: KeyPath, folder: Path) -> Path:
    """Return the base of relative paths at `path`: the recipe's folder; the working directory for `--set`."""
    return Path.cwd() if document.locate(path).startswith("--set") else folder


def _validate_environment(
    value: Any, base: Callable[[KeyPath], Path], where: KeyPath = ("environment",), label: str = "environment"
) -> dict[str, Any]:
    """Validate a section with the environment's model, then by constructing the environment."""
    if not isinstance(value, dict):
        remedy = f"{label}: {{id: reasoning_gym, task: chain_sum}}"
        if isinstance(value, str) and value:
            parts = zip(("id", "task"), value.split("/", 1), strict=False)
            remedy = f"{label}: {{{', '.join(f'{key}: {text}' for key, text in parts)}}}"
        raise ProblemsError([Problem(where, f"{label} must be a section with keys", remedy)])
    registry = import_environment_registry()
    if is_file_reference(value.get("id")) and registry.SOURCE not in value:
        key = (*where, "id")
        value = {**value, registry.SOURCE: read_source(value["id"], base(key), key)}
    checked: dict[str, Any] = value
    try:
        source = value.get(registry.SOURCE)
        if (
            registry.is_known_environment(value)
            and (model := registry.environment_spec(value["id"], source)) is not None
        ):
            of_file = {key: value[key] for key in ("id", registry.SOURCE) if is_file_reference(value["id"])}
            fields = {key: field for key, field in value.items() if key not in of_file}
            checked = validate(model, fields, where, label).model_dump(mode="json") | of_file
            if value["id"] == registry.MIXTURE:
                checked["parts"] = {
                    name: _validate_part(part, base, (*where, "parts", name), f"{label}.parts.{name}")
                    for name, part in checked["parts"].items()
                }
            if registry.has_borrowed_tasks(value):
                inner = (*where, registry.TASKS)
                checked[registry.TASKS] = _validate_part(
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


def _validate_part(
    part: dict[str, Any], base: Callable[[KeyPath], Path], where: KeyPath, label: str
) -> dict[str, Any]:
    """Validate a part of a mixture: an environment section with the keys of parts and, possibly, rewards."""
    registry = import_environment_registry()
    if part["id"] == registry.MIXTURE:
        remedy = "list its parts in the outer mixture"
        raise ProblemsError([Problem((*where, "id"), f"{label}: a part cannot be a mixture", remedy)])
    extra = {key: part[key] for key in (*registry.PART_KEYS, registry.REWARDS) if key in part}
    if terms := extra.get(registry.REWARDS):
        extra[registry.REWARDS] = read_reward_terms(terms, base, (*where, registry.REWARDS))
    section = {key: value for key, value in part.items() if key not in extra}
    checked = _validate_environment(section, base, where, label)
    return {key: value for key, value in checked.items() if key in part or key != "episodes"} | extra


def _validate_stages(
    value: Any, base: Callable[[KeyPath], Path], environment: Callable[[], Any]
) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        remedy = "begin each stage with '- name: NAME'"
        raise ProblemsError([Problem(("stages",), "stages must be a list", remedy)])
    problems: list[Problem] = []
    stages: list[Stage] = []
    positions: dict[str, int] = {}
    for index, item in enumerate(value):
        path = ("stages", index)
        try:
            stage = _validate_stage(item, path, base, environment())
        except ProblemsError as found:
            problems += found.problems
            continue
        if stage.name in positions:
            problems.append(Problem((*path, "name"), f"two stages have the name '{stage.name}'"))
        elif stage.name in Recipe.model_fields:
            what = f"'{stage.name}' is a key of recipes, so a stage cannot have this name"
            problems.append(Problem((*path, "name"), what))
        else:
            positions[stage.name] = index
            stages.append(stage)
    if not problems:
        makes: dict[str, OutputKind] = {MODEL: "checkpoint"}
        makes |= {stage.name: load_plugin(stage.task).produces for stage in stages}
        problems = [problem for stage in stages for problem in _check_references(stage, makes, positions)]
    if problems:
        raise ProblemsError(problems)
    return [stage.model_dump() for stage in _sort_stages(stages, positions)]


def _validate_stage(item: Any, path: KeyPath, base: Callable[[KeyPath], Path], environment: Any) -> Stage:
    if not isinstance(item, dict):
        raise ProblemsError([Problem(path, "a stage is a mapping with at least name and task")])
    label = f"stages.{item.get('name', path[-1])}"
    header = {key: item[key] for key in ("name", "task", "environment") if key in item}
    stage = validate(Stage, header, path, label)
    try:
        spec = load_plugin(stage.task).spec
    except RequestError as error:
        remedy = TASK_REMEDIES.get(stage.task) or suggest_name(stage.task, plugin_names())
        raise ProblemsError([Problem((*path, "task"), f"{label}.task: {error.what}", remedy)]) from None
    own = {key: value for key, value in item.items() if key not in header}
    own = read_source_files(own, code_fields(spec), base, path)
    fields = validate(spec, own, path, label).model_dump(mode="json")
    fields |= dict.fromkeys(name for name in by_model_fields(spec) if name not in own)
    for field in path_fields(spec):
        fields[field] = _absolute_path(fields[field], base((*path, field)))
    files = file_fields(spec, fields)
    for field, name in files.items():
        fields[field] = _find_data(name, base((*path, field)), (*path, field), f"{label}.{field}")
    consumes = {
        field: fields[field]
        for field in consumed_fields(spec)
        if fields[field] is not None and field not in files
    }
    section = _merge_environment(stage.environment, environment, base, (*path, "environment"), label)
    for field in environment_fields(spec):
        for name, keys in (get_field(fields, field) or {}).items():
            key = f"{field}.{name}"
            merged = _merge_environment(keys, section or environment, base, (*path, *key.split(".")), label)
            fields = replace_field(fields, key, merged or keys)
    return stage.model_copy(update={"spec": fields, "consumes": consumes, "environment": section})


def _find_data(name: str, base: Path, path: KeyPath, key: str) -> str:
    try:
        return str(find_source((base / Path(name).expanduser()).absolute()))
    except RequestError as error:
        raise ProblemsError([Problem(path, f"{key}: {error.where}: {error.what}", error.remedy)]) from None


def _merge_environment(
    keys: dict[str, Any], environment: Any, base: Callable[[KeyPath], Path], path: KeyPath, label: str
) -> dict[str, Any]:
    """Apply `keys` to `environment` and validate the result; empty without keys or an environment."""
    if not keys or not (environment or "id" in keys):
        return {}
    merged = ({} if "id" in keys else environment) | keys
    return _validate_environment(merged, base, path, ".".join((label, *map(str, path[2:]))))


def _absolute_path(name: str | None, base: Path) -> str | None:
    """Return the absolute path of a file or folder; a URL unchanged."""
    if name is None or "://" in name or "@" in name.partition("/")[0]:
        return name
    return str((base / Path(name).expanduser()).absolute())


def _check_references(
    stage: Stage, makes: Mapping[str, OutputKind], positions: Mapping[str, int]
) -> list[Problem]:
    wanted = consumed_fields(load_plugin(stage.task).spec)
    problems = []
    for field, source in stage.consumes.items():
        kind = wanted[field]
        if makes.get(source) == kind and source != stage.name:
            continue
        path = ("stages", positions[stage.name], field)
        fitting = [name for name, output in makes.items() if output == kind and name != stage.name]
        key = f"stages.{stage.name}.{field}"
        makes_kind = f"a stage that makes {describe_kind(kind)}"
        choices = f"one of: {', '.join(fitting)}" if fitting else f"add {makes_kind}"
        if source == stage.name:
            problems.append(Problem(path, f"{key}: a stage cannot consume itself", choices))
        elif source not in makes:
            what = f"{key} takes the output of a stage, and no stage is named '{source}'"
            remedy = suggest_name(source, fitting) if fitting else choices
            if file_fields(load_plugin(stage.task).spec, {field: f"./{source}"}):
                remedy += f"; a file or folder of your own is ./{source}"
            problems.append(Problem(path, what, remedy))
        else:
            what = f"{key} needs {makes_kind}, and '{source}' makes {describe_kind(makes[source])}"
            problems.append(Problem(path, what, choices))
    return problems


_KINDS = {"preferences": "preference pairs", "reward_model": "a reward model", "utterances": "utterances"}


def describe_kind(kind: str) -> str:
    """Return an output kind in words: "a dataset", "preference pairs"."""
    return _KINDS.get(kind, f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}")


def _sort_stages(stages: list[Stage], positions: dict[str, int]) -> list[Stage]:
    """Sort the stages: in the written order, except that each follows the stages it consumes.

    Raises:
        ProblemsError: when stages consume each other in a cycle.
    """
    ready: list[Stage] = []
    finished = {MODEL}
    waiting = list(stages)
    while waiting:
        free = (n for n, stage in enumerate(waiting) if finished.issuperset(stage.consumes.values()))
        first = next(free, None)
        if first is None:
            cycle = _find_cycle(waiting)
            what = f"stages consume each other in a cycle: {' <- '.join(cycle)}"
            raise ProblemsError([Problem(("stages", positions[cycle[0]]), what)])
        ready.append(waiting.pop(first))
        finished.add(ready[-1].name)
    return ready


def _find_cycle(waiting: list[Stage]) -> list[str]:
    """Return the names of stages along a cycle. The first name is also the last."""
    needs = {stage.name: stage.consumes.values() for stage in waiting}
    chain = [waiting[0].name]
    while chain.count(chain[-1]) == 1:
        chain.append(next(name for name in needs[chain[-1]] if name in needs))
    return chain[chain.index(chain[-1]) :]
