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
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class StreamedResponse(Response):
    """A response that is sent while it is generated, such as server-sent events or audio.

    Args:
        pieces: the bytes to send.
        finished: called at the end, with True if all pieces were sent, otherwise with False.
    """

    def __init__(
        self, pieces: AsyncIterator[bytes], finished: Callable[[bool], None], media_type: str
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._pieces, self._finished = pieces, finished

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
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
