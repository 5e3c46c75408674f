"""POST /v1/responses: chats in the format of OpenAI's Responses API, and the stored conversations.

The server keeps the most recently used conversations in memory, for requests with `previous_response_id`.
"""

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from perilune.errors import RequestError
from perilune.serve.bodies import read_request
from perilune.serve.errors import ApiError, shorten
from perilune.serve.response_answer import ResponseAnswer
from perilune.serve.response_body import ResponseBody, add_item
from perilune.serve.schema import ChatBody
from perilune.serve.service import Service

_MAX_BYTES = 1 << 26  # of all stored conversations, as JSON
_MAX_CONVERSATIONS = 2000
_MIN_RESPONSES = 8  # a response above 1/8 of `_MAX_BYTES` is not stored: it would drop too many others

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _StoredResponse:
    """A response, and the messages of its conversation up to its end, as JSON to save memory."""

    document: bytes
    messages: bytes

    @property
    def size(self) -> int:
        return len(self.document) + len(self.messages)


class Conversations:
    """The most recently used conversations, within a limit on their total size."""

    def __init__(self, max_bytes: int = _MAX_BYTES, max_count: int = _MAX_CONVERSATIONS) -> None:
        self._max_bytes, self._max_count = max_bytes, max_count
        self._stored: OrderedDict[str, _StoredResponse] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()  # responses that are not streamed are added from other threads

    def add(self, document: dict[str, Any], messages: Messages) -> None:
        """Store a response and its conversation unless very large, and drop the least recently used ones."""
        kept = _StoredResponse(json.dumps(document).encode(), json.dumps(messages).encode())
        if kept.size > self._max_bytes // _MIN_RESPONSES:
            return
        with self._lock:
            self._stored[document["id"]] = kept
            self._bytes += kept.size
            while self._bytes > self._max_bytes or len(self._stored) > self._max_count:
                _, dropped = self._stored.popitem(last=False)
                self._bytes -= dropped.size

    def response(self, response_id: str) -> bytes:
        """Return a stored response as JSON.

        Raises:
            ApiError: 404, when it is not stored.
        """
        return self._find(response_id, "response_id").document

    def messages(self, response_id: str) -> bytes:
        """Return the messages of a conversation up to the end of a stored response, as JSON.

        Raises:
            ApiError: 404, when the response is not stored.
        """
        return self._find(response_id, "previous_response_id").messages

    def _find(self, response_id: str, param: str) -> _StoredResponse:
        with self._lock:
            return self._lookup(response_id, param)

    def _lookup(self, response_id: str, param: str) -> _StoredResponse:
        if response_id not in self._stored:
            message = f"no response {shorten(response_id)!r}; it was not stored, or dropped for newer ones"
            raise ApiError(404, message, param=param, code="previous_response_not_found")
        self._stored.move_to_end(response_id)
        return self._stored[response_id]

    def remove(self, response_id: str) -> None:
        """Delete a stored response.

        Raises:
            ApiError: 404, when it is not stored.
        """
        with self._lock:
            self._bytes -= self._lookup(response_id, "response_id").size
            del self._stored[response_id]


def response_routes(service: Service, conversations: Conversations) -> APIRouter:
    router = APIRouter(prefix="/v1/responses")

    @router.post("", response_model=None)
    async def create(request: Request) -> Response:
        body, size = await read_request(request, ResponseBody, service.lanes)
        earlier = b"[]"
        if body.previous_response_id is not None:
            earlier = conversations.messages(body.previous_response_id)
        size += len(earlier)

        def continued() -> tuple[Messages, ChatBody]:
            messages: Messages = json.loads(earlier) + body.messages
            return messages, body.chat(messages)

        messages, chat = await service.lanes.short_or_long(size, continued)
        parts = service.make_reader_factory(chat)
        if body.logprobs and parts is not None:
            raise ApiError(400, "log-probs need a request without tools and a server without --reasoning")

        def keep(document: dict[str, Any]) -> None:
            if body.store:
                after = list(messages)
                for item in document["output"]:
                    add_item(after, item)
                conversations.add(document, after)

        answer = ResponseAnswer(
            _echo_arguments(body, chat.temperature, chat.top_p),
            streams=body.stream,
            keep=keep,
            token_formatter=service.token_formatter if body.logprobs else None,
            parts=parts,
            new_id=service.make_id_factory(chat.messages),
            count=lambda text: _count_tokens(service, text),
        )
        return await service.converse(chat, answer, size, request)

    @router.get("/{response_id}", response_model=None)
    async def retrieve(response_id: str) -> Response:
        return Response(conversations.response(response_id), media_type="application/json")

    @router.delete("/{response_id}")
    async def delete(response_id: str) -> dict[str, Any]:
        conversations.remove(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return router


def _count_tokens(service: Service, text: str) -> int:
    try:
        return len(service.model.tokenizer.encode(text))
    except RequestError:  # a replacement character that the vocabulary lacks
        return len(text)


def _echo_arguments(body: ResponseBody, temperature: float, top_p: float) -> dict[str, Any]:
    """Return the fields of a response that repeat arguments of the request."""
    form = body.text.format
    return {
        "model": body.model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "store": body.store,
        "temperature": temperature,
        "text": {
            "format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
        },
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools],
        "top_logprobs": body.top_logprobs,
        "top_p": top_p,
        "truncation": "disabled",
    }
