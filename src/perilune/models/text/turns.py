"""Token ids of conversations with several turns, in which sampled tokens are never encoded again.

The text of a conversation does not determine its tokens, because the policy may have sampled a word in other
pieces than the tokenizer would choose. So a conversation only grows at the end: sampled tokens stay, and the
messages of the other side follow, with the text that the chat template puts around them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perilune.errors import RequestError
from perilune.files import canonical_json, sha256_bytes
from perilune.models.text.spelled_tokens import Rendered
from perilune.models.text.tokenizer import Tokenizer

Message = Mapping[str, str]


def continuation(
    tokenizer: Tokenizer, opening: Sequence[Message], messages: Sequence[Message], last_token: int
) -> list[int]:
    """Token ids between a turn of the policy and its next turn.

    A control token that `messages` spell out stays text.

    Args:
        opening: the first messages of the conversation, which a template may require.
        messages: the messages since the policy's turn.
        last_token: the last token of that turn; it is not repeated when the template writes it.

    Raises:
        RequestError: when the template refuses the messages or changes the assistant's text.
    """
    if tokenizer.chat_template is None:
        return tokenizer.encode("".join(message["content"] for message in messages))
    mark = sha256_bytes(canonical_json([[dict(one) for one in part] for part in (opening, messages)]))
    (ids,) = tokenizer.encode_pieces([_after(tokenizer, opening, messages, mark)])
    return ids[1:] if ids[:1] == [last_token] else ids


def encode_turns(
    tokenizer: Tokenizer, messages: Sequence[Message]
) -> tuple[list[int], list[int], list[bool]]:
    """Token ids of a conversation to imitate, as if the policy had sampled its turns.

    Returns:
        the prompt's token ids; all token ids after it; and for each of these, whether it belongs to the
        assistant, whose end-of-sequence tokens count.

    Raises:
        RequestError: as `continuation`, and when the vocabulary lacks a character.
    """
    first = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
    opening = messages[:first]
    prompt_ids = tokenizer.encode_prompt(opening)
    token_ids: list[int] = []
    mask: list[bool] = []
    observations: list[Message] = []
    for message in messages[first:]:
        if message["role"] != "assistant":
            observations.append(message)
            continue
        if token_ids:
            between = continuation(tokenizer, opening, observations, token_ids[-1])
            token_ids += between
            mask += [False] * len(between)
        completion = tokenizer.encode_completion(message["content"])
        token_ids += completion
        mask += [True] * len(completion)
        observations = []
    return prompt_ids, token_ids, mask


def _after(
    tokenizer: Tokenizer, opening: Sequence[Message], messages: Sequence[Message], mark: str
) -> Rendered:
    """The template's output after an assistant message with the text `mark`, which is unique."""
    marked = {"role": "assistant", "content": mark}
    (rendered,) = tokenizer.render_pieces([[*opening, marked, *messages]])
    _, separator, after = rendered.text.partition(mark)
    if not separator:
        raise RequestError(
            "the chat template does not write the text of a message unchanged, so turns cannot be joined",
            where="chat template",
        )
    return rendered.with_text(after)
