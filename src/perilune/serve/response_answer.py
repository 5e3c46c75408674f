"""The responses of POST /v1/responses, whole and as events of a stream.

The answer of a chat becomes output items: its reasoning, its content as a message, and its calls. In a
stream, the events of an item begin with `response.output_item.added` and end with
`response.output_item.done`.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from time import time
from typing import Any, Literal

from perilune.engine.request import Delta
from perilune.errors import PeriluneError
from perilune.serve.answers import TokenFormatter, Usage, encode_json
from perilune.serve.errors import http_status
from perilune.serve.parts import Beginning, Kind, Reader


class ResponseAnswer:
    """Builds the response to one request of the Responses API.

    Args:
        echo: the fields that repeat arguments of the request.
        streams: whether to send the response as events.
        keep: called with the complete response.
        token_formatter: formats log-probs; None for no log-probs. With log-probs, all text must be content.
        parts: creates the reader of the answer; None if all text is content.
        new_id: creates the id of a tool call from its name and its number in the answer.
        count: counts the tokens of a text, for the number of reasoning tokens.

    Attributes:
        beginning: the kind of text at the start.
    """

    def __init__(
        self,
        echo: Mapping[str, Any],
        *,
        streams: bool,
        keep: Callable[[dict[str, Any]], None],
        token_formatter: TokenFormatter | None,
        parts: Callable[..., Reader] | None,
        new_id: Callable[[str, int], str],
        count: Callable[[str], int],
    ) -> None:
        self.beginning: Beginning = "content"
        self._streams, self._keep, self._formatter = streams, keep, token_formatter
        self._make_reader, self._new_id, self._count = parts, new_id, count
        self._reader: Reader | None = None
        self._header = {"id": _make_id("resp"), "object": "response", "created_at": int(time()), **echo}
        self._output: list[dict[str, Any]] = []
        self._open: Kind | Literal["call"] | None = None  # of the last item, while it grows
        self._texts: list[str] = []  # of the open item
        self._status = "in_progress"
        self._sequence = 0
        self._events = b""

    def build_response(
        self, choices: Sequence[Delta], prompts: Sequence[Sequence[int]], usage: Usage
    ) -> dict[str, Any]:
        """Return the whole response, which has one choice."""
        self._add_delta(choices[0])
        return self._complete(usage)

    def first_event(self, index: int) -> bytes:
        """Return the events before the first piece."""
        for kind in ("created", "in_progress"):
            self._emit(f"response.{kind}", response=self._document())
        return self._take_events()

    def delta_event(self, index: int, delta: Delta) -> bytes:
        """Return the events of new tokens."""
        self._add_delta(delta)
        return self._take_events()

    def last_event(self, usage: Usage) -> bytes:
        """Return the last event, with the whole response."""
        self._emit(f"response.{self._status}", response=self._complete(usage))
        return self._take_events()

    def error_event(self, error: PeriluneError) -> bytes:
        opening = b"" if self._sequence else self.first_event(0)
        self._status = "failed"
        code = "server_error" if http_status(error) >= 500 else "invalid_prompt"
        response = self._document() | {"error": {"code": code, "message": error.what}}
        self._emit("response.failed", response=response)
        return opening + self._take_events()

    # -- items -------------------------------------------------------------------------------------------

    def _add_delta(self, delta: Delta) -> None:
        last = delta.finish_reason is not None
        if self._make_reader is None:
            rows = [] if self._formatter is None else self._formatter.format_logprobs(delta)
            if delta.text or rows:
                self._add_text("content", delta.text, rows)
        else:
            self._reader = self._reader or self._make_reader(beginning=self.beginning)
            for kind, part in self._reader.feed(delta.text, last=last).items:
                if isinstance(part, tuple):
                    self._begin_call_item(*part)
                elif kind == "arguments":
                    self._add_arguments(part)
                elif kind == "end":
                    self._end_item("completed")
                else:
                    self._add_text(kind, part, [])  # type: ignore[arg-type]
        if last:
            self._status = "completed" if delta.finish_reason == "stop" else "incomplete"
            if not self._output:
                self._begin_text_item("content")
            self._end_item(self._status)

    def _add_text(self, kind: Kind, text: str, logprobs: list[dict[str, Any]]) -> None:
        """Add text to the open item, or to a new one if the open item has another kind."""
        if self._open != kind:
            self._end_item("completed")
            self._begin_text_item(kind)
        self._texts.append(text)
        if kind == "reasoning":
            self._emit("response.reasoning_text.delta", **self._location(), delta=text)
            return
        if self._formatter is not None:
            self._output[-1]["content"][0]["logprobs"] += logprobs
        self._emit("response.output_text.delta", **self._location(), delta=text, logprobs=logprobs)

    def _begin_text_item(self, kind: Kind) -> None:
        self._open = kind
        if kind == "reasoning":
            item: dict[str, Any] = {"id": _make_id("rs"), "type": "reasoning", "summary": []}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": _make_id("msg"), "type": "message", "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._add_item(item | {"status": "in_progress", "content": []})
        self._emit("response.content_part.added", **self._location(), part=part)
        self._output[-1]["content"].append(part)

    def _end_item(self, status: str) -> None:
        """Complete the open item, if there is one."""
        if self._open is None:
            return
        if self._open == "call":
            item, arguments = self._output[-1], "".join(self._texts)
            fields = {"arguments": arguments, "name": item["name"]}
            self._emit("response.function_call_arguments.done", **self._call_location(), **fields)
            item["arguments"] = arguments
        else:
            part = self._output[-1]["content"][0]
            part["text"] = text = "".join(self._texts)
            if self._open == "reasoning":
                self._emit("response.reasoning_text.done", **self._location(), text=text)
            else:
                logprobs = part["logprobs"]
                self._emit("response.output_text.done", **self._location(), text=text, logprobs=logprobs)
            self._emit("response.content_part.done", **self._location(), part=part)
        self._texts, self._open = [], None
        self._output[-1]["status"] = status
        index = len(self._output) - 1
        self._emit("response.output_item.done", output_index=index, item=self._output[-1])

    def _begin_call_item(self, name: str, arguments: str) -> None:
        """Begin an item with a call, which stays open for further arguments."""
        self._end_item("completed")
        self._open = "call"
        number = sum(item["type"] == "function_call" for item in self._output)
        call_id = self._new_id(name, number)
        item = {"id": _make_id("fc"), "type": "function_call", "call_id": call_id, "name": name}
        self._add_item(item | {"arguments": "", "status": "in_progress"})
        self._add_arguments(arguments)

    def _add_arguments(self, arguments: str) -> None:
        self._texts.append(arguments)
        if arguments:
            self._emit("response.function_call_arguments.delta", **self._call_location(), delta=arguments)

    def _add_item(self, item: dict[str, Any]) -> None:
        self._output.append(item)
        self._emit("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _location(self) -> dict[str, Any]:
        """Return the fields of an event that locate the text of the last item."""
        index = len(self._output) - 1
        return {"item_id": self._output[-1]["id"], "output_index": index, "content_index": 0}

    def _call_location(self) -> dict[str, Any]:
        location = self._location()
        del location["content_index"]
        return location

    # -- documents ---------------------------------------------------------------------------------------

    def _complete(self, usage: Usage) -> dict[str, Any]:
        """Return the whole response, after passing it to `keep`."""
        thoughts = [item["content"][0]["text"] for item in self._output if item["type"] == "reasoning"]
        response = self._document() | {
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": sum(map(self._count, thoughts))},
                "total_tokens": usage.prompt + usage.completion,
            }
        }
        self._keep(response)
        return response

    def _document(self) -> dict[str, Any]:
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            **self._header,
            "status": self._status,
            "error": None,
            "incomplete_details": incomplete,
            "output": list(self._output),
            "usage": None,
        }

    def _emit(self, kind: str, **fields: Any) -> None:
        """Serialize an event and add it to `_events`: now, because its items change later."""
        if self._streams:
            document = {"type": kind, "sequence_number": self._sequence, **fields}
            self._events += f"event: {kind}\ndata: {encode_json(document)}\n\n".encode()
            self._sequence += 1

    def _take_events(self) -> bytes:
        events, self._events = self._events, b""
        return events


def _make_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
