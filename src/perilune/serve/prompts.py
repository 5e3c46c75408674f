"""Encodes prompts and conversations as tokens in threads, so that the event loop is never blocked."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.errors import WorkFailedError
from perilune.models.text.spelled_tokens import Rendered
from perilune.models.text.turns import is_in_template, render_continued
from perilune.serve.errors import ApiError
from perilune.serve.lanes import LONG_TASK_SIZE, Lanes
from perilune.serve.model import ServedModel
from perilune.serve.schema import Message
from perilune.serve.tool_formats import ToolFormat

_MAX_CHARS_PER_TOKEN = 16  # characters of a prompt for each token of the context; English has 4 to 5
_TESTS_CONTENT = re.compile(r"\bcontent\b['\"\]]* is (not )?none")


@dataclass(frozen=True)
class Conversation:
    """Messages, the tools to show to the model, and variables of the chat template.

    Attributes:
        continues_last: whether the answer continues the last message.
    """

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]]
    variables: Mapping[str, Any]
    continues_last: bool = False


class Prompts:
    """Encodes the prompts of one model."""

    def __init__(self, model: ServedModel, lanes: Lanes) -> None:
        self.model, self._lanes = model, lanes
        self._stopped = ""  # why no more templates are rendered; "" while they are

    def stop(self, reason: str) -> None:
        """Render no more templates; `reason` is the error."""
        self._stopped = reason
        if self.model.tokenizer.chat_template is not None:
            self.model.tokenizer.chat_template.interrupt()

    async def encode_conversation(self, conversation: Conversation, size: int) -> list[int]:
        """Encode a conversation from a body of `size` bytes."""
        tokenizer = self.model.tokenizer
        last = conversation.messages[-1]
        if conversation.continues_last and (last.content is None or last.tool_calls):
            raise ApiError(
                400,
                "the last message has no content, or has tool calls, so it cannot be continued",
                param="continue_final_message",
            )
        messages = await self._lanes.short_or_long(size, lambda: self._messages(conversation))
        if tokenizer.chat_template is None:
            return await self._lanes.short_or_long(size, lambda: tokenizer.encode_prompt(messages))
        rendered = await self._lanes.run("template", lambda: self._render(messages, conversation))
        size = len(rendered[0].text)
        self.check_length(size, "messages")
        (tokens,) = await self._lanes.short_or_long(size, lambda: tokenizer.encode_pieces(rendered))
        return tokens

    async def encode_texts(
        self, prompts: Sequence[str | list[int]], size: int, max_tokens: int | None, param: str = "prompt"
    ) -> list[list[int]]:
        """Encode prompts from a body of `size` bytes, and check that they leave room for `max_tokens`."""
        return await self._lanes.short_or_long(
            size, lambda: [self._encode_text(prompt, max_tokens, param) for prompt in prompts]
        )

    def _messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        calls = self.model.tool_format
        as_text = None if self._template_has("tool_calls") else calls
        messages = [self._document(message, as_text) for message in conversation.messages]
        if conversation.tools and not self._template_has("tools"):
            first = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
            system = calls.describe((tool["function"] for tool in conversation.tools), first)
            messages.insert(0, {"role": "system", "content": system})
        self.check_length(sum(message.characters for message in conversation.messages), "messages")
        return messages

    def _document(self, message: Message, calls_as_text: ToolFormat | None) -> dict[str, Any]:
        """Return the message as the chat template expects it."""
        document, template = message.document(calls_as_text), self.model.tokenizer.chat_template
        if message.role == "developer" and not is_in_template(self.model.tokenizer, "developer"):
            document["role"] = "system"  # most templates drop or refuse other roles
        missing = message.content is None and "tool_calls" in document
        if missing and template is not None and _TESTS_CONTENT.search(template.source):
            document["content"] = None  # the template of DeepSeek-V3 writes calls only if the content is None
        return document

    def _render(self, messages: list[dict[str, Any]], conversation: Conversation) -> list[Rendered]:
        if self._stopped:
            raise WorkFailedError(self._stopped)
        variables = dict(conversation.variables)
        if conversation.tools and self._template_has("tools"):
            variables["tools"] = conversation.tools
        if conversation.continues_last:
            return [render_continued(self.model.tokenizer, messages, variables)]
        return self.model.tokenizer.render_pieces([messages], **variables)

    def _template_has(self, variable: str) -> bool:
        """Return whether the chat template uses `variable` and the server's format of calls."""
        template = self.model.tokenizer.chat_template
        if template is None:
            return False
        return variable in template.source and self.model.tool_format.matches_template(template.source)

    def _encode_text(self, prompt: str | list[int], max_tokens: int | None, param: str) -> list[int]:
        if isinstance(prompt, str):
            self.check_length(len(prompt), param)
            prompt = self.model.tokenizer.encode_text_prompt(prompt)
        if prompt and max(prompt) >= self.model.vocab_size:
            raise ApiError(400, f"the vocabulary has no token {max(prompt)}", param=param)
        self.count_remaining_tokens(len(prompt), max_tokens, param)
        return prompt

    def check_length(self, found: int, param: str) -> None:
        """Refuse a text of `found` characters that is too long, because encoding it would take seconds."""
        if found > max(_MAX_CHARS_PER_TOKEN * self.model.context, LONG_TASK_SIZE):
            raise ApiError(
                400,
                f"the prompt has {found:,} characters; the context has {self.model.context:,} tokens",
                param=param,
                code="context_length_exceeded",
            )

    def count_remaining_tokens(self, prompt: int, max_tokens: int | None, param: str) -> int:
        """Return the number of tokens left for an answer after a prompt of `prompt` tokens."""
        if not prompt:
            raise ApiError(400, "the prompt has no tokens", param=param)
        room = self.model.context - prompt
        if room < 1 or (max_tokens is not None and max_tokens > room):
            more = "" if max_tokens is None else f", and max_tokens is {max_tokens}"
            raise ApiError(
                400,
                f"the context has {self.model.context} tokens; the prompt has {prompt}{more}",
                param=param,
                code="context_length_exceeded",
            )
        return room
