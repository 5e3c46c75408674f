"""The documents of POST /v1/responses, whole and as the events of a stream.

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
from perilune.serve.answers import Spelling, Usage, encode_json
from perilune.serve.errors import status_of
from perilune.serve.parts import Beginning, Kind, Reader


class ResponseAnswer:
    """Builds one response.

    Args:
        echo: the fields that repeat arguments of the request.
        streams: whether to send the response as events.
        keep: called with the complete response.
        spelling: formats log-probs; None for no log-probs. With log-probs, all text must be content.
        parts: creates the parser for reasoning and calls; None if all text is content.
        new_id: creates the id of a tool call.
        count: counts the tokens of a text.

    Attributes:
        begins: what the text begins with.
    """

    def __init__(
        self,
        echo: Mapping[str, Any],
        *,
        streams: bool,
        keep: Callable[[dict[str, Any]], None],
        spelling: Spelling | None,
        parts: Callable[..., Reader] | None,
        new_id: Callable[[], str],
        count: Callable[[str], int],
    ) -> None:
        self.begins: Beginning = "content"
        self._streams, self._keep, self._spelling = streams, keep, spelling
        self._make_reader, self._new_id, self._count = parts, new_id, count
        self._reader: Reader | None = None
        self._head = {"id": _id("resp"), "object": "response", "created_at": int(time()), **echo}
        self._output: list[dict[str, Any]] = []
        self._open: Kind | Literal["call"] | None = None  # of the last item, while it grows
        self._texts: list[str] = []  # of the open item
        self._status = "in_progress"
        self._sequence = 0
        self._events = b""

    def whole(
        self, choices: Sequence[Delta], prompts: Sequence[Sequence[int]], usage: Usage
    ) -> dict[str, Any]:
        """The whole response, which has one choice."""
        self._gain(choices[0])
        return self._complete(usage)

    def opening(self, index: int) -> bytes:
        """The events before the first piece."""
        for kind in ("created", "in_progress"):
            self._emit(f"response.{kind}", response=self._document())
        return self._taken()

    def piece(self, index: int, gained: Delta) -> bytes:
        """The events of new tokens."""
        self._gain(gained)
        return self._taken()

    def closing(self, usage: Usage) -> bytes:
        """The last event, with the whole response."""
        self._emit(f"response.{self._status}", response=self._complete(usage))
        return self._taken()

    def failed(self, error: PeriluneError) -> bytes:
        """The last event of a response that failed."""
        opening = b"" if self._sequence else self.opening(0)
        self._status = "failed"
        code = "server_error" if status_of(error) >= 500 else "invalid_prompt"
        response = self._document() | {"error": {"code": code, "message": error.what}}
        self._emit("response.failed", response=response)
        return opening + self._taken()

    # -- items -------------------------------------------------------------------------------------------

    def _gain(self, gained: Delta) -> None:
        """Add new tokens to the output."""
        last = gained.finish_reason is not None
        if self._make_reader is None:
            rows = [] if self._spelling is None else self._spelling.rows(gained)
            if gained.text or rows:
                self._say("content", gained.text, rows)
        else:
            self._reader = self._reader or self._make_reader(begins=self.begins)
            for kind, one in self._reader.feed(gained.text, last=last).items:
                if isinstance(one, tuple):
                    self._call(*one)
                elif kind == "arguments":
                    self._argue(one)
                elif kind == "end":
                    self._end("completed")
                else:
                    self._say(kind, one, [])  # type: ignore[arg-type]
        if last:
            self._status = "completed" if gained.finish_reason == "stop" else "incomplete"
            if not self._output:
                self._begin("content")
            self._end(self._status)

    def _say(self, kind: Kind, text: str, logprobs: list[dict[str, Any]]) -> None:
        """Add text to the open item, or to a new one if the open item has another kind."""
        if self._open != kind:
            self._end("completed")
            self._begin(kind)
        self._texts.append(text)
        if kind == "reasoning":
            self._emit("response.reasoning_text.delta", **self._place(), delta=text)
            return
        if self._spelling is not None:
            self._output[-1]["content"][0]["logprobs"] += logprobs
        self._emit("response.output_text.delta", **self._place(), delta=text, logprobs=logprobs)

    def _begin(self, kind: Kind) -> None:
        """Begin an item that contains text."""
        self._open = kind
        if kind == "reasoning":
            item: dict[str, Any] = {"id": _id("rs"), "type": "reasoning", "summary": []}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": _id("msg"), "type": "message", "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._add(item | {"status": "in_progress", "content": []})
        self._emit("response.content_part.added", **self._place(), part=part)
        self._output[-1]["content"].append(part)

    def _end(self, status: str) -> None:
        """Complete the open item, if there is one."""
        if self._open is None:
            return
        if self._open == "call":
            item, arguments = self._output[-1], "".join(self._texts)
            done = {"arguments": arguments, "name": item["name"]}
            self._emit("response.function_call_arguments.done", **self._place_of_call(), **done)
            item["arguments"] = arguments
            self._texts, self._open = [], None
            self._done(status)
            return
        part = self._output[-1]["content"][0]
        part["text"] = "".join(self._texts)
        if self._open == "reasoning":
            self._emit("response.reasoning_text.done", **self._place(), text=part["text"])
        else:
            logprobs = part["logprobs"]
            self._emit("response.output_text.done", **self._place(), text=part["text"], logprobs=logprobs)
        self._emit("response.content_part.done", **self._place(), part=part)
        self._texts, self._open = [], None
        self._done(status)

    def _call(self, name: str, arguments: str) -> None:
        """Begin an item with a call, which stays open for further arguments."""
        self._end("completed")
        self._open = "call"
        item = {"id": _id("fc"), "type": "function_call", "call_id": self._new_id(), "name": name}
        self._add(item | {"arguments": "", "status": "in_progress"})
        self._argue(arguments)

    def _argue(self, arguments: str) -> None:
        """Add arguments to the open call."""
        self._texts.append(arguments)
        if arguments:
            self._emit("response.function_call_arguments.delta", **self._place_of_call(), delta=arguments)

    def _add(self, item: dict[str, Any]) -> None:
        self._output.append(item)
        self._emit("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _done(self, status: str) -> None:
        self._output[-1]["status"] = status
        index = len(self._output) - 1
        self._emit("response.output_item.done", output_index=index, item=self._output[-1])

    def _place(self) -> dict[str, Any]:
        """The fields of an event that locate the text of the last item."""
        index = len(self._output) - 1
        return {"item_id": self._output[-1]["id"], "output_index": index, "content_index": 0}

    def _place_of_call(self) -> dict[str, Any]:
        place = self._place()
        del place["content_index"]
        return place

    # -- documents ---------------------------------------------------------------------------------------

    def _complete(self, usage: Usage) -> dict[str, Any]:
        """The whole response, after passing it to `keep`."""
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
            **self._head,
            "status": self._status,
            "error": None,
            "incomplete_details": incomplete,
            "output": list(self._output),
            "usage": None,
        }

    def _emit(self, kind: str, **fields: Any) -> None:
        """Serialise an event at once, because its items change later."""
        if self._streams:
            document = {"type": kind, "sequence_number": self._sequence, **fields}
            self._events += f"event: {kind}\ndata: {encode_json(document)}\n\n".encode()
            self._sequence += 1

    def _taken(self) -> bytes:
        events, self._events = self._events, b""
        return events


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
