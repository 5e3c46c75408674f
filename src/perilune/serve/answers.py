"""The documents of chat and text completions, whole and as chunks of a stream."""

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

from perilune.data.tool_calls import ToolCall
from perilune.engine.request import Delta
from perilune.errors import PeriluneError
from perilune.serve.errors import error_document, status_of
from perilune.serve.parts import Beginning, Reader
from perilune.serve.tool_formats import FORMATS

DONE = b"data: [DONE]\n\n"
_OF_CALLS = ("call", "arguments")

# OpenAI has no finish reason for an answer whose format allows no further token. Such an answer is
# incomplete, like one that was cut off, and "stop" would mark it as complete.
_INCOMPLETE: dict[str | None, str] = {"aborted": "length"}

encode_json = json.JSONEncoder(
    separators=(",", ":"), ensure_ascii=False
).encode  # creating an encoder costs as much as encoding


@dataclass(slots=True)
class Usage:
    """Tokens of a request."""

    prompt: int
    completion: int = 0
    cached: int = 0

    def document(self) -> dict[str, Any]:
        """The object `usage` of OpenAI's API."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Spelling:
    """Text and bytes of single tokens, for the lists of log-probs.

    Args:
        spell: gives the text of one token; of a control token, its name.
        token_bytes: bytes of each token by id; None where unknown.
    """

    def __init__(self, spell: Callable[[int], str], token_bytes: Sequence[bytes | None]) -> None:
        self.text = cache(spell)
        self._bytes = token_bytes

    def rows(self, gained: Delta) -> list[dict[str, Any]]:
        """The log-probs of new tokens, as in chats."""
        rows = []
        for place, (token, logprob) in enumerate(zip(gained.token_ids, gained.logprobs, strict=True)):
            likely = gained.top_logprobs[place] if gained.top_logprobs else []
            top = [self._row(one, of_one) for one, of_one in likely]
            rows.append(self._row(token, logprob) | {"top_logprobs": top})
        return rows

    def _row(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": logprob, "bytes": self.bytes(token)}

    def width(self, token: int) -> int:
        """Characters that `token` adds to the text; 0 for a control token."""
        return len(self.text(token)) if self.bytes(token) is not None else 0

    def bytes(self, token: int) -> list[int] | None:
        """The bytes of `token`, which may be part of a character; None for control tokens."""
        found = self._bytes[token] if token < len(self._bytes) else None
        return None if found is None else list(found)


class Answer:
    """Builds the documents of one response.

    Args:
        chat: a chat completion; otherwise a text completion.
        logprobs: include log-probs.
        with_ids: include token ids and policy versions.
        parts: makes what splits the text of a choice of a chat; None for text that is all content.
        new_id: makes the id of a tool call.

    Attributes:
        begins: what the text of a choice begins with.
        with_usage: whether a stream ends with the usage.
        names_function: whether the request names the function to call. A call then is the whole answer, whose
            finish reason is "stop", as in OpenAI's API.
        echoed: the prompts, which stand before the choices of a text completion; empty unless requested.
    """

    def __init__(
        self,
        model: str,
        spelling: Spelling,
        *,
        chat: bool,
        logprobs: bool,
        with_ids: bool,
        parts: Callable[..., Reader] | None = None,
        new_id: Callable[[], str] = FORMATS["hermes"].new_id,
    ) -> None:
        self.with_usage = self.names_function = False
        self.echoed: Sequence[Delta] = ()
        self._new_id = new_id
        self.begins: Beginning = "content"
        self._make_reader = parts
        self._readers: dict[int, Reader] = {}
        self._calls: Counter[int] = Counter()  # of each choice so far
        self._spelling, self._chat = spelling, chat
        self._logprobs, self._with_ids = logprobs, with_ids
        self._offsets: dict[int, int] = {}  # characters of each choice so far
        self._kind, self._piece_kind = (
            ("chat.completion", "chat.completion.chunk") if chat else ("text_completion",) * 2
        )
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(
        self, choices: Sequence[Delta], prompts: Sequence[Sequence[int]], usage: Usage
    ) -> dict[str, Any]:
        """The whole response. The choices of each prompt are consecutive."""
        each = len(choices) // len(prompts)
        listed = []
        for index, gained in enumerate(choices):
            choice = self._choice(index, gained)
            if self._chat:
                said = self._said(index, gained, choice)
                for call in said.get("tool_calls", ()):
                    del call["index"]  # only in a stream
                choice["message"] = {"role": "assistant", "refusal": None, **said}
            else:
                choice["text"] = gained.text
            if self.echoed:
                self._put_before(choice, self.echoed[index // each])
            if self._with_ids:
                choice["prompt_token_ids"] = list(prompts[index // each])
            listed.append(choice)
        return {"object": self._kind, **self._head, "choices": listed, "usage": usage.document()}

    def _put_before(self, choice: dict[str, Any], prompt: Delta) -> None:
        """Put the prompt before the text of a choice, and before its log-probs."""
        choice["text"] = prompt.text + choice["text"]
        if (after := choice["logprobs"]) is None:
            return
        before = self._text_logprobs(prompt, 0)
        before["token_logprobs"] = [None, *before["token_logprobs"][1:]]  # nothing predicts the first token
        after["text_offset"] = [len(prompt.text) + place for place in after["text_offset"]]
        if after["top_logprobs"] is not None:
            before["top_logprobs"][0] = None
            after["top_logprobs"] = before["top_logprobs"] + after["top_logprobs"]
        joined = ("tokens", "token_logprobs", "text_offset")
        choice["logprobs"] = after | {name: before[name] + after[name] for name in joined}

    def opening(self, index: int) -> bytes:
        """The first event of a choice: the role in a chat; empty for text."""
        if not self._chat:
            return b""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def piece(self, index: int, gained: Delta) -> bytes:
        """The event with the new tokens of one choice."""
        choice = self._choice(index, gained)
        if self._chat:
            choice["delta"] = self._said(index, gained, choice)
            if not gained.text and not gained.token_ids and not choice["delta"].get("content"):
                choice["delta"].pop("content", None)
        else:
            choice["text"] = gained.text
        return self._event([choice])

    def _said(self, index: int, gained: Delta, choice: dict[str, Any]) -> dict[str, Any]:
        """The fields of a message with what was gained. A choice with calls gets its own finish reason."""
        if self._make_reader is None:
            return {"content": gained.text}
        if index not in self._readers:
            self._readers[index] = self._make_reader(begins=self.begins)
        parts = self._readers[index].feed(gained.text, last=gained.finish_reason is not None)
        said: dict[str, Any] = {"content": parts.content}
        if parts.reasoning:
            said["reasoning_content"] = parts.reasoning
        if calls := [self._call(index, one) for kind, one in parts.items if kind in _OF_CALLS]:
            said["content"] = parts.content or None
            said["tool_calls"] = calls
        if self._calls[index] and choice["finish_reason"] == "stop" and not self.names_function:
            choice["finish_reason"] = "tool_calls"
        return said

    def _call(self, index: int, given: str | ToolCall) -> dict[str, Any]:
        """A call that begins, or further arguments of the last one."""
        if isinstance(given, str):
            return {"index": self._calls[index] - 1, "function": {"arguments": given}}
        name, arguments = given
        self._calls[index] += 1
        return {
            "index": self._calls[index] - 1,
            "id": self._new_id(),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def closing(self, usage: Usage) -> bytes:
        """The last events."""
        return (self._event([], usage=usage.document()) if self.with_usage else b"") + DONE

    def failed(self, error: PeriluneError) -> bytes:
        """The last event of an answer that failed after its status was sent."""
        return event(error_document(status_of(error), error.what))

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({"object": self._piece_kind, **self._head, "choices": choices, **more})

    def _choice(self, index: int, gained: Delta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": self._logprob_document(index, gained) if self._logprobs else None,
            "finish_reason": _INCOMPLETE.get(gained.finish_reason, gained.finish_reason),
        }
        if self._with_ids:
            choice |= {"token_ids": gained.token_ids, "policy_version": gained.policy_version}
        return choice

    def _logprob_document(self, index: int, gained: Delta) -> dict[str, Any]:
        if self._chat:
            return {"content": self._spelling.rows(gained), "refusal": None}
        begin = self._offsets.get(index, 0)
        self._offsets[index] = begin + sum(map(self._spelling.width, gained.token_ids))
        return self._text_logprobs(gained, begin)

    def _text_logprobs(self, gained: Delta, begin: int) -> dict[str, Any]:
        """The log-probs of tokens whose text begins at the character `begin`."""
        tokens = [self._spelling.text(token) for token in gained.token_ids]
        widths = map(self._spelling.width, gained.token_ids[:-1])
        top = None
        if gained.top_logprobs:
            drawn = zip(gained.token_ids, gained.logprobs, strict=True)
            rows = zip(gained.top_logprobs, drawn, strict=True)
            top = [{self._spelling.text(one): lp for one, lp in (*row, sampled)} for row, sampled in rows]
        return {
            "tokens": tokens,
            "token_logprobs": gained.logprobs,
            "top_logprobs": top,
            "text_offset": list(accumulate(widths, initial=begin)) if tokens else [],
        }


def event(document: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_json(document).encode() + b"\n\n"
