"""What stands between two turns of a policy, in tokens: tokens that were sampled are never made again.

The text of a conversation does not determine its tokens: a policy may have spelt a word in other pieces than
its tokenizer would. So a conversation grows by its end alone: sampled tokens stay, and after them come the
tokens of what others said, with whatever the chat template puts around it.
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
    """Token ids to put after a turn of the policy, so that it may speak again.

    Args:
        opening: the messages that the conversation began with; a template may refuse others without them.
        messages: what was said since the policy's turn.
        last_token: that ended the turn; it is not repeated where the template would write it.

    What `messages` say is text: a control token spelt in it does not become one.

    Raises:
        RequestError: when the template refuses the messages, or changes what the assistant says.
    """
    if tokenizer.chat_template is None:
        return tokenizer.encode("".join(message["content"] for message in messages))
    mark = sha256_bytes(canonical_json([[dict(one) for one in part] for part in (opening, messages)]))
    (ids,) = tokenizer.encode_pieces([_after(tokenizer, opening, messages, mark)])
    return ids[1:] if ids[:1] == [last_token] else ids


def encode_turns(
    tokenizer: Tokenizer, messages: Sequence[Message]
) -> tuple[list[int], list[int], list[bool]]:
    """A conversation to be imitated, in the tokens that it would have grown in.

    Returns:
        the prompt's token ids; those of all that follows; and, for each of the latter, whether the assistant
        says it, its end-of-sequence tokens included.

    Raises:
        RequestError: as `continuation`, and when the vocabulary lacks a character.
    """
    first = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
    opening = messages[:first]
    prompt_ids = tokenizer.encode_prompt(opening)
    token_ids: list[int] = []
    mask: list[bool] = []
    heard: list[Message] = []
    for message in messages[first:]:
        if message["role"] != "assistant":
            heard.append(message)
            continue
        if token_ids:
            between = continuation(tokenizer, opening, heard, token_ids[-1])
            token_ids += between
            mask += [False] * len(between)
        said = tokenizer.encode_completion(message["content"])
        token_ids += said
        mask += [True] * len(said)
        heard = []
    return prompt_ids, token_ids, mask


def _after(
    tokenizer: Tokenizer, opening: Sequence[Message], messages: Sequence[Message], mark: str
) -> Rendered:
    """What the template writes after an assistant that says `mark`, a text that nothing else holds."""
    said = {"role": "assistant", "content": mark}
    (rendered,) = tokenizer.render_pieces([[*opening, said, *messages]])
    _, found, after = rendered.text.partition(mark)
    if not found:
        raise RequestError(
            "the chat template does not repeat what a message says, so turns cannot be joined",
            where="chat template",
        )
    return rendered.with_text(after)
