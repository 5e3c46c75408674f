"""A connection that is not kept for somebody who does nothing with it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_SEND_BUFFER = 256 << 10  # bytes that the kernel holds for a reader; left to itself it takes megabytes
_FIRST_REQUEST = 30.0  # seconds to ask something in


def patient_for(seconds: float, on_stall: Callable[[], None]) -> type[asyncio.Protocol]:
    """uvicorn's protocol, but a reader that takes nothing of what was sent to it is given up after `seconds`.

    `on_stall` is called whenever that happens.
    """

    class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _giving_up: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            self.loop.call_later(_FIRST_REQUEST, self._unless_asked)

        def pause_writing(self) -> None:
            """As much is sent as the network takes; from here on the answer waits for the reader."""
            super().pause_writing()
            self._giving_up = self.loop.call_later(seconds, self._give_up)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop_waiting()

        def _give_up(self) -> None:
            self.transport.abort()
            on_stall()

        def _stop_waiting(self) -> None:
            if self._giving_up is not None:
                self._giving_up.cancel()
                self._giving_up = None

        def _unless_asked(self) -> None:
            if self.cycle is None:
                self.transport.abort()

    return Connection
