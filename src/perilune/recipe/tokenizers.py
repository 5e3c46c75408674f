"""Chooses the tokenizer of a new model: characters, or bytes if a text of the recipe has other characters."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from perilune.bundle.plugin import environment_fields, file_fields, load_plugin
from perilune.files import get_field
from perilune.recipe.problems import Problem, ProblemsError
from perilune.recipe.schema import Recipe

BPE_TOKENS = 2048  # default of vocab_size


def choose_tokenizer(recipe: Recipe) -> Recipe:
    """Choose the tokenizer of the new model of a recipe: `characters` if it has all characters of the texts.

    Raises:
        ProblemsError: when the recipe sets `characters`, and a text has another character.
    """
    model = recipe.model
    if model is None or model.preset is None or model.tokenizer == "bytes":
        return recipe
    if model.tokenizer == "bpe":
        sized = model.model_copy(update={"vocab_size": model.vocab_size or BPE_TOKENS})
        return recipe.model_copy(update={"model": sized})
    reason = find_foreign_character(recipe)
    if reason is None:
        return recipe
    if model.tokenizer == "characters":
        remedy = "bytes or bpe, which encode any text; or change the text"
        raise ProblemsError([Problem(("model", "tokenizer"), f"model.tokenizer: {reason}", remedy)])
    return recipe.model_copy(update={"model": model.model_copy(update={"tokenizer": "bytes"})})


def find_foreign_character(recipe: Recipe) -> str | None:
    """Describe the first character that the character tokenizer lacks, and its location, if there is one."""
    module = _import_texts()
    for texts in _iterate_texts(recipe):
        if (found := module.find_missing_character(texts, module.find_foreign_character)) is not None:
            return f"characters has {found}"
    return None


def _iterate_texts(recipe: Recipe) -> Iterator[Iterator[tuple[str, str]]]:
    """Yield the texts of the user's own files, then those of each distinct environment."""
    sections: list[dict[str, Any]] = [recipe.environment]
    for stage in recipe.stages:
        spec = load_plugin(stage.task).spec
        for path in file_fields(spec, stage.spec).values():
            yield _import_texts().read_data_texts(Path(path))
        own = [stage.environment]
        for field in environment_fields(spec):
            own += (get_field(stage.spec, field) or {}).values()
        sections += [section for section in own if section not in sections]
    yield from (_import_texts().read_environment_texts(section) for section in sections if section)


def _import_texts() -> Any:
    """Import by name, because the control plane imports this module and must not depend on environments."""
    return import_module("perilune.data.texts")
