"""Token ids of conversations with several turns, in which sampled tokens are never encoded again.

The text of a conversation does not determine its tokens, because the policy may have sampled a word in other
pieces than the tokenizer would choose. So a conversation only grows at the end: sampled tokens stay, and the
messages of the other side follow, with the text that the chat template puts around them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from perilune.errors import RequestError
from perilune.files import canonical_json, sha256_bytes
from perilune.models.text.spelled_tokens import Rendered
from perilune.models.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
PLAIN = ("role", "content", "name", "weight")  # keys of an assistant's message that no template is needed for


def continuation(
    tokenizer: Tokenizer,
    opening: Sequence[Message],
    messages: Sequence[Message],
    last_token: int,
    **variables: Any,
) -> list[int]:
    """Token ids between a turn of the policy and its next turn.

    A control token that `messages` spell out stays text.

    Args:
        opening: the first messages of the conversation, which a template may require.
        messages: the messages since the policy's turn.
        last_token: the last token of that turn; it is not repeated when the template writes it.
        variables: further inputs of the template, such as `tools`.

    Raises:
        RequestError: when the template refuses the messages or changes the assistant's text.
    """
    if tokenizer.chat_template is None:
        return tokenizer.encode("".join(message["content"] for message in messages))
    mark = sha256_bytes(canonical_json([[dict(one) for one in part] for part in (opening, messages)]))
    (ids,) = tokenizer.encode_pieces([_after(tokenizer, opening, messages, mark, variables)])
    return ids[1:] if ids[:1] == [last_token] else ids


def encode_turns(
    tokenizer: Tokenizer, messages: Sequence[Message], first: int | None = None, **variables: Any
) -> tuple[list[int], list[int], list[bool]]:
    """Token ids of a conversation to imitate, as if the policy had sampled its turns.

    Args:
        first: index of the first message to imitate, the assistant's; by default its first one.
        variables: further inputs of the template, such as `tools`.

    Returns:
        the prompt's token ids; all token ids after it; and for each of these, whether it is learned: those of
        the assistant and its end-of-sequence tokens, except in messages with `weight` 0.

    Raises:
        RequestError: as `continuation`, and when the vocabulary lacks a character.
    """
    if first is None:
        first = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
    opening = messages[:first]
    prompt_ids = tokenizer.encode_prompt(opening, **variables)
    token_ids: list[int] = []
    mask: list[bool] = []
    observations: list[Message] = []
    for place, message in enumerate(messages[first:], start=first):
        if message["role"] != "assistant":
            observations.append(message)
            continue
        if token_ids:
            between = continuation(tokenizer, opening, observations, token_ids[-1], **variables)
            token_ids += between
            mask += [False] * len(between)
        completion = _encode_turn(tokenizer, messages[:place], message, variables)
        token_ids += completion
        mask += [message.get("weight", 1) != 0] * len(completion)
        observations = []
    return prompt_ids, token_ids, mask


def _encode_turn(
    tokenizer: Tokenizer, before: Sequence[Message], message: Message, variables: Mapping[str, Any]
) -> list[int]:
    """Token ids of one message of the assistant, with `eos_token_id` at the end.

    A message with more than text, such as tool calls or reasoning, is what the chat template makes of it.
    """
    if not any(
        is_in_template(tokenizer, key) for key, value in message.items() if key not in PLAIN and value
    ):
        return tokenizer.encode_completion(message["content"])
    (prompt,) = tokenizer.render_pieces([before], **variables)
    written = {**variables, "add_generation_prompt": False}
    (whole,) = tokenizer.render_pieces([[*before, message]], **written)
    if not whole.text.startswith(prompt.text):
        raise RequestError(
            "the chat template writes a prompt differently before its answer, so turns cannot be joined",
            where="chat template",
        )
    (ids,) = tokenizer.encode_pieces([whole.with_text(whole.text[len(prompt.text) :])])
    end = tokenizer.eos_token_id
    return [*ids[: ids.index(end) if end in ids else None], end]


def is_in_template(tokenizer: Tokenizer, name: str) -> bool:
    """Whether the chat template uses a variable or a key of messages."""
    template = tokenizer.chat_template
    return template is not None and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template.source) is not None


def _after(
    tokenizer: Tokenizer,
    opening: Sequence[Message],
    messages: Sequence[Message],
    mark: str,
    variables: Mapping[str, Any],
) -> Rendered:
    """The template's output after an assistant message with the text `mark`, which is unique."""
    marked = {"role": "assistant", "content": mark}
    (rendered,) = tokenizer.render_pieces([[*opening, marked, *messages]], **variables)
    _, separator, after = rendered.text.partition(mark)
    if not separator:
        raise RequestError(
            "the chat template does not write the text of a message unchanged, so turns cannot be joined",
            where="chat template",
        )
    return rendered.with_text(after)
