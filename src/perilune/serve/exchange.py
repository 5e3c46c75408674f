"""Turns the deltas of one request into its response."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from perilune.engine.request import Delta
from perilune.errors import PeriluneError
from perilune.serve.answers import Usage
from perilune.serve.engine_thread import Stream
from perilune.serve.metrics import Metrics
from perilune.serve.parts import Beginning
from perilune.serve.responses import while_connected

_PACE = 0.01  # seconds between two events of a stream; tokens in between are sent together


class Answering(Protocol):
    """Builds the documents of one response."""

    begins: Beginning

    def whole(
        self, choices: Sequence[Delta], prompts: Sequence[Sequence[int]], usage: Usage
    ) -> dict[str, Any]:
        """The whole response. The choices of each prompt are consecutive."""

    def opening(self, index: int) -> bytes:
        """The events before the first piece of a choice."""

    def piece(self, index: int, gained: Delta) -> bytes:
        """The events with new tokens of a choice."""

    def closing(self, usage: Usage) -> bytes:
        """The last events."""

    def failed(self, error: PeriluneError) -> bytes:
        """The last events of a response that failed."""


class Exchange:
    """One request in progress.

    Args:
        began: arrival of the request, on the performance counter.

    Attributes:
        usage: tokens so far.
    """

    def __init__(self, stream: Stream, answer: Answering, metrics: Metrics, began: float) -> None:
        self._stream, self._answer, self._metrics, self._began = stream, answer, metrics, began
        self._prompts = [request.token_ids for request in stream.requests]
        self.usage = Usage(sum(map(len, self._prompts)))
        self._begun: set[int] = set()  # choices with a first event
        self._cached = [0] * len(self._prompts)  # tokens of each prompt found in the prefix cache

    async def document(self, request: Request) -> Response:
        """The response in one document.

        Raises:
            Disconnected: when the client left.
            RequestError: when the engine finds the request impossible.
            WorkFailedError: when the request or the engine failed.
        """
        try:
            choices = await while_connected(self._collected(), request.receive)
        finally:
            self.close()
        ordered = [choices[choice] for choice in sorted(choices)]
        # In a thread, because many choices with log-probs are many megabytes.
        return await asyncio.to_thread(
            lambda: JSONResponse(self._answer.whole(ordered, self._prompts, self.usage))
        )

    async def _collected(self) -> dict[int, Delta]:
        choices: dict[int, Delta] = {}
        while deltas := await self._next():
            choices.update(deltas)
        return choices

    async def events(self) -> AsyncIterator[bytes]:
        """The response as server-sent events, those of one step in one piece."""
        try:
            while deltas := await self._next():
                sent = b""
                for choice, delta in deltas:
                    if choice not in self._begun:
                        self._begun.add(choice)
                        sent += self._answer.opening(choice)
                    sent += self._answer.piece(choice, delta)
                if sent:
                    yield sent
                    await self._stream.linger(_PACE)
        except PeriluneError as error:  # the status is sent already
            yield self._answer.failed(error)
            return
        yield self._answer.closing(self.usage)

    async def _next(self) -> list[tuple[int, Delta]]:
        deltas = await self._stream.next()
        if deltas and self._stream.in_pieces and not self.usage.completion:
            self._metrics.first_token(self._began)
        each = self._stream.requests[0].n
        for choice, delta in deltas:
            self.usage.completion += len(delta.token_ids)
            prompt = choice // each
            self._cached[prompt] = max(self._cached[prompt], delta.cached_tokens)
        self.usage.cached = sum(self._cached)
        return deltas

    def close(self) -> None:
        """Record that the response was sent, or stop the engine because the client has left."""
        self._stream.abort()
        usage = self.usage
        self._metrics.finished(
            self._began, prompt=usage.prompt, completion=usage.completion, cached=usage.cached
        )
