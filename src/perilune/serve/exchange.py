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
from perilune.serve.responses import run_while_connected

_EVENT_INTERVAL_S = 0.01  # seconds between two events of a stream; tokens in between are sent together


class AnswerBuilder(Protocol):
    """The builder of one response.

    Attributes:
        beginning: the kind of text at the start of each choice.
    """

    beginning: Beginning

    def build_response(
        self, choices: Sequence[Delta], prompts: Sequence[Sequence[int]], usage: Usage
    ) -> dict[str, Any]:
        """Return the whole response. The choices of each prompt are consecutive."""

    def first_event(self, index: int) -> bytes:
        """Return the events before the first piece of a choice."""

    def delta_event(self, index: int, delta: Delta) -> bytes:
        """Return the events with new tokens of a choice."""

    def last_event(self, usage: Usage) -> bytes:
        """Return the last events."""

    def error_event(self, error: PeriluneError) -> bytes:
        """Return the last events of a response that failed."""


class Exchange:
    """One request in progress: takes the deltas of a stream, builds the response and records metrics.

    Args:
        began: arrival of the request, in seconds of the performance counter.

    Attributes:
        usage: numbers of tokens so far.
    """

    def __init__(self, stream: Stream, answer: AnswerBuilder, metrics: Metrics, began: float) -> None:
        self._stream, self._answer, self._metrics, self._began = stream, answer, metrics, began
        self._prompts = [request.token_ids for request in stream.requests]
        self.usage = Usage(sum(map(len, self._prompts)))
        self._started: set[int] = set()  # choices with a first event
        self._cached = [0] * len(self._prompts)  # tokens of each prompt found in the prefix cache

    async def json_response(self, request: Request) -> Response:
        """Wait for all samples, and return them as one JSON response.

        Raises:
            DisconnectedError: when the client left.
            RequestError: when the engine finds the request impossible.
            WorkFailedError: when the request or the engine failed.
        """
        try:
            choices = await run_while_connected(self._collect(), request.receive)
        finally:
            self.close()
        ordered = [choices[choice] for choice in sorted(choices)]
        # In a thread, because encoding many choices with log-probs (megabytes) would block the event loop.
        return await asyncio.to_thread(
            lambda: JSONResponse(self._answer.build_response(ordered, self._prompts, self.usage))
        )

    async def _collect(self) -> dict[int, Delta]:
        choices: dict[int, Delta] = {}
        while deltas := await self._next():
            choices.update(deltas)
        return choices

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events; the events of one step are one piece."""
        try:
            while deltas := await self._next():
                sent = b""
                for choice, delta in deltas:
                    if choice not in self._started:
                        self._started.add(choice)
                        sent += self._answer.first_event(choice)
                    sent += self._answer.delta_event(choice, delta)
                if sent:
                    yield sent
                    await self._stream.linger(_EVENT_INTERVAL_S)
        except PeriluneError as error:  # the status is sent already
            yield self._answer.error_event(error)
            return
        yield self._answer.last_event(self.usage)

    async def _next(self) -> list[tuple[int, Delta]]:
        deltas = await self._stream.next_deltas()
        if deltas and self._stream.per_token and not self.usage.completion:
            self._metrics.record_first_token(self._began)
        each = self._stream.requests[0].n
        for choice, delta in deltas:
            self.usage.completion += len(delta.token_ids)
            prompt = choice // each
            self._cached[prompt] = max(self._cached[prompt], delta.cached_tokens)
        self.usage.cached = sum(self._cached)
        return deltas

    def close(self) -> None:
        """Record the request in the metrics, and stop sampling if the stream has not ended."""
        self._stream.abort()
        usage = self.usage
        self._metrics.record_finished(
            self._began, prompt=usage.prompt, completion=usage.completion, cached=usage.cached
        )
