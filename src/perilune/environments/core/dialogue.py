"""Runs a coroutine that holds a conversation, and pauses it wherever it awaits a reply.

This turns an environment that calls a model into a session that is called with actions.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from perilune.environments.core.protocol import Message

T = TypeVar("T")
Ask = Callable[[Sequence[Message]], Awaitable[str]]
"""Takes the conversation so far; returns the policy's reply."""


class Dialogue(Generic[T]):
    """A conversation in progress. The coroutine runs only inside `begin`, `next` and `close`.

    Args:
        loop: an event loop that is not running. Several dialogues may share it.
        play: holds the conversation: it awaits a reply with the function it is given, and returns a result.
        context: a context manager that is entered whenever a part of `play` runs.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        play: Callable[[Ask], Coroutine[Any, Any, T]],
        context: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._loop, self._context = loop, context
        self._request: asyncio.Future[Sequence[Message]] = loop.create_future()
        self._reply: asyncio.Future[str] | None = None
        self._task = loop.create_task(play(self._ask))

    def begin(self) -> Sequence[Message] | None:
        """Run to the first awaited reply. Return the conversation so far; None if `play` has returned."""
        with self._context():
            futures: set[asyncio.Future[Any]] = {self._task, self._request}
            self._loop.run_until_complete(asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED))
        return None if self._task.done() else self._request.result()

    def next(self, reply: str) -> Sequence[Message] | None:
        """Reply, and run to the next awaited reply. Return the conversation so far; None at the end."""
        assert self._reply is not None
        waiting, self._reply = self._reply, None
        self._request = self._loop.create_future()
        if not waiting.done():  # otherwise `play` has cancelled the part that awaits it
            waiting.set_result(reply)
        return self.begin()

    def result(self) -> T:
        """Return what `play` returned, or raise what it raised."""
        return self._task.result()

    def close(self) -> None:
        """Cancel `play` if it has not returned. May be called repeatedly, and after the loop was closed."""
        if not self._task.done() and not self._loop.is_closed():
            self._task.cancel()
            with self._context(), contextlib.suppress(asyncio.CancelledError, Exception):
                self._loop.run_until_complete(self._task)

    async def _ask(self, conversation: Sequence[Message]) -> str:
        if self._reply is not None:
            raise RuntimeError("a second reply is awaited before the first one has arrived")
        self._reply = self._loop.create_future()
        self._request.set_result(conversation)
        return await self._reply
