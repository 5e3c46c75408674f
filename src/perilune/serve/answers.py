"""The JSON responses of chat and text completions, whole and as events of a stream."""

import codecs
import json
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from perilune.data.tool_calls import ToolCall
from perilune.engine.request import Delta
from perilune.errors import PeriluneError
from perilune.serve.errors import error_document, http_status
from perilune.serve.parts import Beginning, Reader
from perilune.serve.tool_formats import FORMATS

DONE = b"data: [DONE]\n\n"
_CALL_KINDS = ("call", "arguments")

# OpenAI has no finish reason for an answer whose format allows no further token. Such an answer is
# incomplete, like an answer that was cut off. "stop" would mark it as complete.
_FINISH_REASONS: dict[str | None, str] = {"aborted": "length"}

# Creating an encoder costs as much as encoding.
encode_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


@dataclass(slots=True)
class Usage:
    """The numbers of tokens of a request."""

    prompt: int
    completion: int = 0
    cached: int = 0

    def document(self) -> dict[str, Any]:
        """Return the object `usage` of OpenAI's API."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class _TextEnd:
    """The end of a text that grows token by token.

    Attributes:
        offset: number of whole characters so far.
        decoder: holds the bytes of an incomplete last character.
    """

    def __init__(self) -> None:
        self.offset, self.decoder = 0, codecs.getincrementaldecoder("utf-8")("replace")


class TokenFormatter:
    """Formats log-probs of tokens with the text and bytes of each token.

    Args:
        token_text: returns the text of a token, or the name of a control token.
        token_bytes: bytes of each token by id; None where unknown.
    """

    def __init__(self, token_text: Callable[[int], str], token_bytes: Sequence[bytes | None]) -> None:
        self.text = cache(token_text)
        self._bytes = token_bytes

    def format_logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the log-probs of new tokens in the format of chat completions."""
        rows = []
        for index, (token, logprob) in enumerate(zip(delta.token_ids, delta.logprobs, strict=True)):
            likely = delta.top_logprobs[index] if delta.top_logprobs else []
            top = [self._format_token(other, value) for other, value in likely]
            rows.append(self._format_token(token, logprob) | {"top_logprobs": top})
        return rows

    def _format_token(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": logprob, "bytes": self.bytes(token)}

    def offsets(self, tokens: Sequence[int], end: _TextEnd) -> list[int]:
        """Return the offset in characters at which each token begins, and advance `end` past the tokens.

        Tokens that are parts of one character have the same offset. A control token has no text.
        """
        offsets = []
        for token in tokens:
            offsets.append(end.offset)
            end.offset += len(end.decoder.decode(bytes(self.bytes(token) or ())))
        return offsets

    def bytes(self, token: int) -> list[int] | None:
        """Return the bytes of `token`, which may be part of a character; None for control tokens."""
        data = self._bytes[token] if token < len(self._bytes) else None
        return None if data is None else list(data)


class CompletionAnswer:
    """Builds the response to one chat or text completion request.

    Args:
        chat: whether to build a chat completion; otherwise a text completion.
        logprobs: whether to include log-probs.
        include_ids: whether to include token ids and policy versions.
        parts: creates the reader of a choice of a chat; None if all text is content.
        new_id: creates the id of a tool call from its name and its number in the answer.

    Attributes:
        beginning: the kind of text at the start of a choice.
        include_usage: whether a stream ends with the usage.
        names_function: whether the request names the function to call. The answer is then one call, and its
            finish reason is "stop", as in OpenAI's API.
        echoed: the prompts, which precede the choices of a text completion; empty unless requested.
    """

    def __init__(
        self,
        model: str,
        token_formatter: TokenFormatter,
        *,
        chat: bool,
        logprobs: bool,
        include_ids: bool,
        parts: Callable[..., Reader] | None = None,
        new_id: Callable[[str, int], str] = FORMATS["hermes"].new_id,
    ) -> None:
        self.include_usage = self.names_function = False
        self.echoed: Sequence[Delta] = ()
        self._new_id = new_id
        self.beginning: Beginning = "content"
        self._make_reader = parts
        self._readers: dict[int, Reader] = {}
        self._calls: Counter[int] = Counter()  # of each choice so far
        self._formatter, self._chat = token_formatter, chat
        self._logprobs, self._include_ids = logprobs, include_ids
        self._text_ends: defaultdict[int, _TextEnd] = defaultdict(_TextEnd)  # by choice
        self._kind, self._piece_kind = (
            ("chat.completion", "chat.completion.chunk") if chat else ("text_completion",) * 2
        )
        self._header = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def build_response(
        self, choices: Sequence[Delta], prompts: Sequence[Sequence[int]], usage: Usage
    ) -> dict[str, Any]:
        """Return the whole response. The choices of each prompt are consecutive."""
        each = len(choices) // len(prompts)
        documents = []
        for index, delta in enumerate(choices):
            choice = self._choice(index, delta)
            if self._chat:
                fields = self._message_fields(index, delta, choice)
                for call in fields.get("tool_calls", ()):
                    del call["index"]  # only in a stream
                choice["message"] = {"role": "assistant", "refusal": None, **fields}
            else:
                choice["text"] = delta.text
            if self.echoed:
                self._prepend_prompt(choice, self.echoed[index // each])
            if self._include_ids:
                choice["prompt_token_ids"] = list(prompts[index // each])
            documents.append(choice)
        return {"object": self._kind, **self._header, "choices": documents, "usage": usage.document()}

    def _prepend_prompt(self, choice: dict[str, Any], prompt: Delta) -> None:
        choice["text"] = prompt.text + choice["text"]
        if (after := choice["logprobs"]) is None:
            return
        before = self._text_logprobs(prompt, _TextEnd())
        before["token_logprobs"] = [None, *before["token_logprobs"][1:]]  # nothing predicts the first token
        after["text_offset"] = [len(prompt.text) + offset for offset in after["text_offset"]]
        if before["top_logprobs"] is not None:
            after["top_logprobs"] = [None, *before["top_logprobs"][1:], *(after["top_logprobs"] or ())]
        joined = ("tokens", "token_logprobs", "text_offset")
        choice["logprobs"] = after | {name: before[name] + after[name] for name in joined}

    def first_event(self, index: int) -> bytes:
        """Return the first event of a choice: the role in a chat; empty for text."""
        if not self._chat:
            return b""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def delta_event(self, index: int, delta: Delta) -> bytes:
        """Return the event with the new tokens of one choice."""
        choice = self._choice(index, delta)
        if self._chat:
            choice["delta"] = self._message_fields(index, delta, choice)
            if not delta.text and not delta.token_ids and not choice["delta"].get("content"):
                choice["delta"].pop("content", None)
        else:
            choice["text"] = delta.text
        return self._event([choice])

    def _message_fields(self, index: int, delta: Delta, choice: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a message with the new parts; set the finish reason of a choice with calls."""
        if self._make_reader is None:
            return {"content": delta.text}
        if index not in self._readers:
            self._readers[index] = self._make_reader(beginning=self.beginning)
        parts = self._readers[index].feed(delta.text, last=delta.finish_reason is not None)
        fields: dict[str, Any] = {"content": parts.content}
        if parts.reasoning:
            fields["reasoning_content"] = parts.reasoning
        if calls := [self._call_fields(index, part) for kind, part in parts.items if kind in _CALL_KINDS]:
            fields["content"] = parts.content or None
            fields["tool_calls"] = calls
        if self._calls[index] and choice["finish_reason"] == "stop" and not self.names_function:
            choice["finish_reason"] = "tool_calls"
        return fields

    def _call_fields(self, index: int, given: str | ToolCall) -> dict[str, Any]:
        """Return the fields of a new call, or of further arguments of the last call."""
        if isinstance(given, str):
            return {"index": self._calls[index] - 1, "function": {"arguments": given}}
        name, arguments = given
        self._calls[index] += 1
        return {
            "index": self._calls[index] - 1,
            "id": self._new_id(name, self._calls[index] - 1),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def last_event(self, usage: Usage) -> bytes:
        """Return the last events."""
        return (self._event([], usage=usage.document()) if self.include_usage else b"") + DONE

    def error_event(self, error: PeriluneError) -> bytes:
        """Return the last event of a response that failed after its status was sent."""
        return encode_event(error_document(http_status(error), error.what))

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        if self.include_usage:  # null in all events but the last
            more = {"usage": None, **more}
        return encode_event({"object": self._piece_kind, **self._header, "choices": choices, **more})

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": self._logprob_document(index, delta) if self._logprobs else None,
            "finish_reason": _FINISH_REASONS.get(delta.finish_reason, delta.finish_reason),
        }
        if self._include_ids:
            choice |= {"token_ids": delta.token_ids, "policy_version": delta.policy_version}
        return choice

    def _logprob_document(self, index: int, delta: Delta) -> dict[str, Any]:
        if self._chat:
            return {"content": self._formatter.format_logprobs(delta), "refusal": None}
        return self._text_logprobs(delta, self._text_ends[index])

    def _text_logprobs(self, delta: Delta, end: _TextEnd) -> dict[str, Any]:
        """Return the log-probs of tokens that continue the text at `end`, and advance `end` past them."""
        top = None
        if delta.top_logprobs:
            drawn = zip(delta.token_ids, delta.logprobs, strict=True)
            rows = zip(delta.top_logprobs, drawn, strict=True)
            text = self._formatter.text
            top = [{text(token): logprob for token, logprob in (*row, sampled)} for row, sampled in rows]
        return {
            "tokens": [self._formatter.text(token) for token in delta.token_ids],
            "token_logprobs": delta.logprobs,
            "top_logprobs": top,
            "text_offset": self._formatter.offsets(delta.token_ids, end),
        }


def encode_event(document: dict[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + encode_json(document).encode() + b"\n\n"
