"""Token ids of conversations with several turns, in which sampled tokens are never encoded again.

The text of a conversation does not determine its tokens, because the policy may have sampled a word in other
pieces than the tokenizer would choose. So a conversation only grows at its end: sampled tokens are kept, and
the other side's messages are appended, with the text that the chat template puts around them.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perilune.errors import RequestError
from perilune.models.text.spelled_tokens import Rendered
from perilune.models.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
PLAIN_KEYS = {"role", "content", "name", "weight"}  # the template renders assistant messages with other keys


def encode_continuation(
    tokenizer: Tokenizer, opening: Sequence[Message], messages: Sequence[Message], last_token: int
) -> list[int]:
    """Encode the text between a turn of the policy and its next turn.

    Control tokens that `messages` spell out stay text.

    Args:
        opening: the first messages of the conversation, which a template may require.
        messages: the messages after the policy's turn.
        last_token: the last token of that turn, which is not repeated if the template writes it.

    Raises:
        RequestError: when the template refuses the messages or changes the assistant's text.
    """
    if tokenizer.chat_template is None:
        return tokenizer.encode("".join(message["content"] for message in messages))
    mark = _make_mark()
    (rendered,) = tokenizer.render_pieces([[*opening, {"role": "assistant", "content": mark}, *messages]])
    (ids,) = tokenizer.encode_pieces([_text_after_mark(rendered, mark)])
    return ids[1:] if ids[:1] == [last_token] else ids


def render_continued(
    tokenizer: Tokenizer, messages: Sequence[Message], variables: Mapping[str, Any]
) -> Rendered:
    """Render the chat template up to the end of the last message's content, which the policy continues.

    The output equals that of transformers with `continue_final_message`: white space at the end of the
    content is stripped if the template strips it.

    Raises:
        RequestError: when the template refuses the messages or changes the content.
    """
    mark, content = _make_mark(), messages[-1]["content"]
    marked = [*messages[:-1], {**messages[-1], "content": f"{content}{mark} "}]
    (rendered,) = tokenizer.render_inputs([{**variables, "messages": marked}])
    before, separator, after = rendered.text.rpartition(mark)
    text = before if after.startswith(" ") else before.rstrip()
    prefix = rendered.with_text(text)
    if not separator or content.strip() not in "".join(prefix.pieces()):
        raise RequestError(
            "the chat template does not write the content of the last message unchanged, so it cannot be"
            " continued",
            where="chat template",
        )
    return prefix


def encode_conversations(
    tokenizer: Tokenizer,
    conversations: Sequence[tuple[Sequence[Message], Sequence[Message], Mapping[str, Any]]],
) -> list[tuple[list[int], list[int], list[bool]]]:
    """Encode conversations to imitate, as if the policy had sampled their turns.

    The templates of all conversations are rendered together, and their texts encoded together.

    Args:
        conversations: for each conversation, the messages of the prompt; the messages after it, of which the
            first is the assistant's; and further inputs of the template, such as `tools`.

    Returns:
        for each conversation, the token ids of the prompt; all token ids after it; and whether each of the
        latter is learned. Tokens of the assistant and its end-of-sequence tokens are learned, except in
        messages with `weight` 0.

    Raises:
        RequestError: as `encode_continuation`, and when the vocabulary lacks a character.
    """
    segments = [_segments(tokenizer, *conversation) for conversation in conversations]
    _encode(tokenizer, [segment for conversation in segments for segment in conversation])
    if tokenizer.chat_template is None:
        prompts = tokenizer.encode_prompts([opening for opening, _, _ in conversations])
        return [(prompt, *_join(tokenizer, parts)) for prompt, parts in zip(prompts, segments, strict=True)]
    return [(parts[0].ids, *_join(tokenizer, parts)) for parts in segments]


@dataclass(slots=True)
class _Segment:
    """A part of a conversation: plain text, or a part of rendered templates.

    Attributes:
        learned: for a turn of the assistant, whether the policy learns it; None for other parts.
        text: the text of a part that is not rendered by the template.
        inputs: inputs of the template: those of one rendering, or those before and after a turn, whose
            renderings differ by this part. Empty for plain text.
        mark: with one rendering, the text that the part follows; "" for all of it.
        ids: the token ids, set by `_encode`.
    """

    learned: bool | None = None
    text: str = ""
    inputs: Sequence[Mapping[str, Any]] = ()
    mark: str = ""
    ids: list[int] = field(default_factory=list)


def _segments(
    tokenizer: Tokenizer, opening: Sequence[Message], turns: Sequence[Message], variables: Mapping[str, Any]
) -> list[_Segment]:
    """Split a conversation into the prompt, the turns of the assistant and the text between them."""
    has_template = tokenizer.chat_template is not None

    def unlearned(messages: Sequence[Message], is_between: bool) -> _Segment:
        if not has_template:
            return _Segment(text="".join(message["content"] for message in messages))
        if not is_between:
            return _Segment(inputs=[{**variables, "messages": messages}])
        mark = _make_mark()
        marked = [*opening, {"role": "assistant", "content": mark}, *messages]
        return _Segment(inputs=[{**variables, "messages": marked}], mark=mark)

    segments = [unlearned(opening, False) if has_template else _Segment()]
    observations: list[Message] = []
    for index, message in enumerate(turns):
        if message["role"] != "assistant":
            observations.append(message)
            continue
        if index:
            segments.append(unlearned(observations, True))
        is_learned = message.get("weight", 1) != 0
        if any(
            is_in_template(tokenizer, key)
            for key, value in message.items()
            if key not in PLAIN_KEYS and value
        ):
            before = [*opening, *turns[:index]]
            whole = {"messages": [*before, message], "add_generation_prompt": False}
            inputs = [{**variables, "messages": before}, {**variables, **whole}]
            segments.append(_Segment(is_learned, inputs=inputs))
        else:
            segments.append(_Segment(is_learned, text=message["content"]))
        observations = []
    return segments


def _encode(tokenizer: Tokenizer, segments: Sequence[_Segment]) -> None:
    """Fill in the token ids of all segments."""
    written = [segment for segment in segments if segment.inputs]
    if written:
        inputs = [item for segment in written for item in segment.inputs]
        rendered = iter(tokenizer.render_inputs(inputs))
        parts = [_extract_rendered(segment, [next(rendered) for _ in segment.inputs]) for segment in written]
        for segment, ids in zip(written, tokenizer.encode_pieces(parts), strict=True):
            segment.ids = ids
    texts = [segment for segment in segments if not segment.inputs]
    for segment, ids in zip(texts, tokenizer.encode_batch([part.text for part in texts]), strict=True):
        segment.ids = ids


def _extract_rendered(segment: _Segment, rendered: Sequence[Rendered]) -> Rendered:
    """Return the part of its rendered templates that belongs to a segment."""
    if len(rendered) == 2:
        prompt, whole = rendered
        if not whole.text.startswith(prompt.text):
            raise RequestError(
                "the chat template renders a prompt differently when an answer follows, so turns cannot be"
                " joined",
                where="chat template",
            )
        return whole.with_text(whole.text[len(prompt.text) :])
    return _text_after_mark(rendered[0], segment.mark) if segment.mark else rendered[0]


def _join(tokenizer: Tokenizer, segments: Sequence[_Segment]) -> tuple[list[int], list[bool]]:
    """Return the token ids after the prompt, and whether each is learned."""
    end = tokenizer.eos_token_id
    token_ids: list[int] = []
    mask: list[bool] = []
    for segment in segments[1:]:
        ids = segment.ids
        if segment.learned is not None:
            ids = [*ids[: ids.index(end) if segment.inputs and end in ids else None], end]
        elif segment.inputs and ids[:1] == token_ids[-1:]:
            ids = ids[1:]
        token_ids += ids
        mask += [bool(segment.learned)] * len(ids)
    return token_ids, mask


def is_in_template(tokenizer: Tokenizer, name: str) -> bool:
    """Return whether the chat template uses the name of a variable or of a key of messages."""
    template = tokenizer.chat_template
    return template is not None and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template.source) is not None


def _make_mark() -> str:
    """Return a random text that no message contains."""
    return secrets.token_hex(32)


def _text_after_mark(rendered: Rendered, mark: str) -> Rendered:
    """Return the template's output after the assistant message with the text `mark`."""
    _, separator, after = rendered.text.partition(mark)
    if not separator:
        what = "the chat template does not write the text of a message unchanged, so turns cannot be joined"
        raise RequestError(what, where="chat template")
    return rendered.with_text(after)
