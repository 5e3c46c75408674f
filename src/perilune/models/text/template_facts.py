"""Facts about a chat template: defaults of variables, the use of system prompts, the tokens of a prompt."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from perilune.errors import RequestError
from perilune.models.text.tokenizer import Tokenizer
from perilune.models.text.turns import is_in_template

SystemUse = Literal["own turn", "in the user's turn", "refused", "ignored"]
_SYSTEM, _USER = "c41fa6e2-system", "c41fa6e2-user"  # texts that no template contains


def recipe_tokenizer(model: Mapping[str, Any], texts: Iterable[str] | None = None) -> Tokenizer:
    """Return the tokenizer of a recipe's `model` section, with its chat template; reads no weights.

    Args:
        texts: as in `Tokenizer.for_new_model`.

    Raises:
        RequestError: when the tokenizer cannot be read, or as `with_recipe_template`.
    """
    folder = model.get("path")
    tokenizer = Tokenizer.load(folder) if folder else Tokenizer.for_new_model(model, texts)
    return with_recipe_template(tokenizer, model)


def with_recipe_template(tokenizer: Tokenizer, model: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer with the chat template of a recipe's `model` section.

    Values of the template's variables, such as `enable_thinking: false`, become defaults in the template, so
    that a saved checkpoint is prompted in the same way everywhere.

    Raises:
        RequestError: when the template is malformed or missing, or does not use one of the variables.
    """
    if model.get("chat_template"):
        tokenizer = tokenizer.with_chat_template(model["chat_template"], where="model.chat_template")
    values: Mapping[str, Any] = model.get("chat_template_kwargs") or {}
    where = "model.chat_template_kwargs"
    if values and tokenizer.chat_template is None:
        raise RequestError("the model has no chat template", where=where, remedy="set model.chat_template")
    if not values or tokenizer.chat_template is None:
        return tokenizer
    for name in values:
        if not name.isidentifier() or not is_in_template(tokenizer, name):
            raise RequestError(
                f"the model's chat template has no variable {name!r}",
                where=where,
                remedy="see the template, chat_template.jinja of the model, for the names of its variables",
            )
    blocks = [
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}"
        for name, value in values.items()
    ]
    # Jinja drops the line break after a block, and the template still begins at the start of a line.
    return tokenizer.with_chat_template("".join(blocks) + "\n" + tokenizer.chat_template.source, where=where)


def _literal(value: bool | float | str | None) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """How a template treats system prompts.

    Attributes:
        system: where the template writes the system prompt, or that it refuses or ignores it.
        default_system: the system prompt that the template adds when none is given.
    """

    system: SystemUse
    default_system: str = ""


def template_facts(tokenizer: Tokenizer) -> TemplateFacts:
    """Determine how the tokenizer's template treats system prompts, by rendering short conversations."""
    user = {"role": "user", "content": _USER}
    try:
        text = tokenizer.render_prompt([{"role": "system", "content": _SYSTEM}, user])
    except RequestError:
        return TemplateFacts("refused")
    before, separator, rest = text.partition(_SYSTEM)
    if not separator:
        return TemplateFacts("ignored")
    between, _, _ = rest.partition(_USER)
    own_turn = tokenizer.chat_template is not None and bool(between.strip())
    try:
        plain = tokenizer.render_prompt([user]).partition(_USER)[0]
    except RequestError:  # the template requires a system prompt
        plain = ""
    has_default = len(plain) > len(before + between) and plain.startswith(before) and plain.endswith(between)
    default = plain[len(before) : len(plain) - len(between)].strip() if own_turn and has_default else ""
    return TemplateFacts("own turn" if own_turn else "in the user's turn", default)


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of a prompt.

    Attributes:
        text: the text, or the name of a control token. Incomplete characters are written as `\\xNN`.
        special: whether the token is a control token.
    """

    id: int
    text: str
    special: bool


def prompt_tokens(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]
) -> tuple[list[PromptToken], int]:
    """Return the tokens of a prompt, and the index of the first one of the assistant's turn."""
    ids = tokenizer.encode_prompt(messages)
    pieces = tokenizer.token_bytes()
    tokens = [
        PromptToken(token_id, tokenizer.token_text(token_id), True)
        if (piece := pieces[token_id]) is None
        else PromptToken(token_id, piece.decode("utf-8", "backslashreplace"), False)
        for token_id in ids
    ]
    if tokenizer.chat_template is None:
        return tokens, len(ids)
    prefix = tokenizer.encode_prompt(messages, add_generation_prompt=False)
    return tokens, len(prefix) if ids[: len(prefix)] == prefix else len(ids)
