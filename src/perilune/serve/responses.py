"""Sends responses, and stops work when the client disconnects."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")


class DisconnectedError(Exception):
    """The client disconnected."""


async def run_while_connected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Run `work` and return its result; cancel it when the client disconnects.

    Raises:
        DisconnectedError: when the client disconnected.
    """
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise DisconnectedError
        return working.result()
    finally:
        await _cancel(working, watching)


class EventStream(Response):
    """Server-sent events.

    Args:
        events: the bytes to send, piece by piece.
        finished: called at the end with True if all events were sent.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], finished: Callable[[bool], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._finished = events, finished

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        complete = False
        try:
            await run_while_connected(self._send_all(send), receive)
            complete = True
        except (DisconnectedError, OSError):
            pass
        finally:
            self._finished(complete)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for events in self._events:
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel unfinished tasks and wait for their cleanup."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
