"""Prompts of `perilune environments sample` as the tokens that a model sees."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from perilune.cli.output import echo
from perilune.errors import RequestError
from perilune.recipe.load import load_recipe
from perilune.recipe.schema import add_rewards

if TYPE_CHECKING:
    from perilune.environments import Environment, Task
    from perilune.models.text.tokenizer import Tokenizer

MIN_WIDTH = 60  # characters in a line of tokens, at least


def recipe_source(name: str, changes: Sequence[str]) -> tuple[dict[str, Any], Tokenizer | None]:
    """Return the environment section of a recipe with its rewards, and its model's tokenizer, if any.

    Raises:
        RequestError: when the recipe is wrong or has no environment, or its tokenizer cannot be read.
    """
    from perilune.models.text.template_facts import recipe_tokenizer

    recipe = load_recipe(name, changes)
    if not recipe.environment:
        raise RequestError("the recipe has no environment", where=name)
    section = add_rewards(recipe.environment, recipe.rewards)
    if recipe.model is None:
        return section, None
    return section, recipe_tokenizer(recipe.model.model_dump())


def token_document(tokenizer: Tokenizer, environment: Environment, task: Task) -> dict[str, Any]:
    """Return the tokens of the first prompt of a task, and the index at which the assistant's turn begins."""
    from perilune.models.text.template_facts import prompt_tokens

    session = environment.reset(task, 0)
    try:
        messages = (*task.prompt, *session.observation.messages)
    finally:
        session.close()
    tokens, assistant = prompt_tokens(tokenizer, messages)
    return {"tokens": [asdict(token) for token in tokens], "assistant_turn": assistant}


def print_facts(facts: Mapping[str, str]) -> None:
    """Print the effect of a system prompt in the chat template."""
    uses = {
        "own turn": "becomes a turn of its own",
        "in the user's turn": "becomes part of the first question",
        "refused": "is refused: set prompting.system_as to user",
        "ignored": "is ignored: set prompting.system_as to user",
    }
    echo(f"chat template: a system prompt {uses[facts['system']]}")
    if facts["default_system"]:
        echo(f"  without one it adds its own: {facts['default_system']!r}")


def print_tokens(row: Mapping[str, Any]) -> None:
    """Print the tokens of a prompt as ID:TEXT, with control tokens in brackets."""
    tokens, start = row["tokens"], row["assistant_turn"]
    width = max(MIN_WIDTH, shutil.get_terminal_size().columns - 10)
    echo(f"  {len(tokens)} tokens; the assistant's turn begins at token {start}, its text at {len(tokens)}")
    for part in (tokens[:start], tokens[start:]):
        words = [_format_token(token) for token in part]
        for line in textwrap.wrap(" ".join(words), width, break_long_words=False, break_on_hyphens=False):
            echo(f"          {line}")


def _format_token(token: Mapping[str, Any]) -> str:
    """Return a token on one line: spaces as ␣, line ends and other control characters escaped."""
    text = "".join(
        "␣" if char == " " else char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in token["text"]
    )
    return f"[{token['id']}:{text}]" if token["special"] else f"{token['id']}:{text}"
