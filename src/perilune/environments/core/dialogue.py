"""A coroutine that holds a conversation, run to where it waits for a reply: turns for what awaits them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from perilune.environments.core.protocol import Message

T = TypeVar("T")
Ask = Callable[[Sequence[Message]], Awaitable[str]]
"""Awaited with the whole conversation so far; gives what the policy says next."""


class Dialogue(Generic[T]):
    """What `play` does with the replies it is given; it runs inside `begin`, `next` and `close` alone.

    Args:
        loop: that is not running; others may use it between.
        inside: entered whenever some of `play` runs.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        play: Callable[[Ask], Coroutine[Any, Any, T]],
        inside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._loop, self._inside = loop, inside
        self._asked: asyncio.Future[Sequence[Message]] = loop.create_future()
        self._reply: asyncio.Future[str] | None = None
        self._playing = loop.create_task(play(self._ask))

    def begin(self) -> Sequence[Message] | None:
        """The conversation up to the first reply; None when there is none to give."""
        with self._inside():
            either: set[asyncio.Future[Any]] = {self._playing, self._asked}
            self._loop.run_until_complete(asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED))
        return None if self._playing.done() else self._asked.result()

    def next(self, reply: str) -> Sequence[Message] | None:
        """The conversation up to the reply after this one; None when `result` is there."""
        assert self._reply is not None
        waiting, self._reply = self._reply, None
        self._asked = self._loop.create_future()
        waiting.set_result(reply)
        return self.begin()

    def result(self) -> T:
        """What `play` returned; raises what it raised."""
        return self._playing.result()

    def close(self) -> None:
        """Cancel what has not ended; may be called again, and after the loop was closed."""
        if not self._playing.done() and not self._loop.is_closed():
            self._playing.cancel()
            with self._inside(), contextlib.suppress(asyncio.CancelledError, Exception):
                self._loop.run_until_complete(self._playing)

    async def _ask(self, conversation: Sequence[Message]) -> str:
        if self._reply is not None:
            raise RuntimeError("the policy is asked again before it has answered")
        self._reply = self._loop.create_future()
        self._asked.set_result(conversation)
        return await self._reply
