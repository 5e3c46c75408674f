"""Connection limits: the server drops idle and slow clients, so a flood of connections does not block it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from perilune.serve.errors import error_document

_SEND_BUFFER = 256 << 10  # bytes that the kernel buffers for a reader; its own default is megabytes
_MAX_HEADERS = 100
_MAX_HEAD_BYTES = 32 << 10  # of the request line and the headers


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on the connections of clients.

    Attributes:
        max_connections: number of open connections. A further connection replaces the one that has been
            waiting longest for a complete request.
        head_seconds: time to receive the headers of a request, from the start of the connection or the end of
            the previous answer.
        stall_seconds: time after which a client that reads nothing is disconnected.
        request_bytes: largest request, with its headers and chunk framing.
    """

    max_connections: int
    head_seconds: float
    stall_seconds: float
    request_bytes: int


@dataclass
class _Connections:
    """The connections of one server.

    Attributes:
        on_stall: called when a client that reads nothing is disconnected.
        waiting: connections that have not sent a whole request, the longest-waiting first.
    """

    limits: ConnectionLimits
    on_stall: Callable[[], None]
    connected: set[_Connection] = field(default_factory=set)
    waiting: dict[_Connection, None] = field(default_factory=dict)


def make_protocol(limits: ConnectionLimits, on_stall: Callable[[], None]) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with `limits`; `on_stall` is called when a stalled client is dropped."""
    return type("Connection", (_Connection,), {"shared": _Connections(limits, on_stall)})


class _Connection(HttpToolsProtocol):
    shared: _Connections
    _stall_timer: asyncio.TimerHandle | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _in_head = False
    _bytes = 0  # of the current request
    _headers = 0
    _header_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        if len(self.shared.connected) >= self.shared.limits.max_connections:
            oldest = next(iter(self.shared.waiting), None)
            if oldest is None:  # every connection is being answered
                self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "the server has too many connections")
                return
            oldest.drop()
        self.shared.connected.add(self)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._deregister()
        self._stop_stall_timer()

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        super().data_received(data)
        if self._in_head and self._bytes > _MAX_HEAD_BYTES:
            self._refuse_head()
        elif self._bytes > self.shared.limits.request_bytes:
            self.drop()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._bytes, self._headers, self._header_bytes = True, 0, 0, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        self._header_bytes += len(name) + len(value)  # `_bytes` is too late if one packet has all headers
        if self._has_large_head:
            raise ValueError("headers are too large")  # the parser stops and calls `send_400_response`
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = False
        self._stop_head_timer()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.shared.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        if self.cycle.response_complete and self.cycle.more_body:
            self.transport.close()  # the rest of the body may never arrive
        super().on_response_complete()
        if self.cycle.response_complete:
            self._start_head_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP."""
        if self._has_large_head:
            self._refuse_head()
        else:
            self._refuse(HTTPStatus.BAD_REQUEST, msg)

    @property
    def _has_large_head(self) -> bool:
        return self._headers > _MAX_HEADERS or self._header_bytes > _MAX_HEAD_BYTES

    def pause_writing(self) -> None:
        """Start the stall timer: the buffers are full, so the response waits for the client."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.shared.limits.stall_seconds, self._stall)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall_timer()

    def drop(self) -> None:
        """Close the connection now and discard unsent bytes."""
        self._deregister()
        self.transport.abort()

    def _stall(self) -> None:
        self.drop()
        self.shared.on_stall()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _start_head_timer(self) -> None:
        self.shared.waiting[self] = None
        self._head_timer = self.loop.call_later(self.shared.limits.head_seconds, self.drop)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _deregister(self) -> None:
        self.shared.connected.discard(self)
        self.shared.waiting.pop(self, None)
        self._stop_head_timer()

    def _refuse_head(self) -> None:
        limit = f"{_MAX_HEADERS} headers or {_MAX_HEAD_BYTES:,} bytes of headers"
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the request has more than {limit}")

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.drop()  # a response would end up in the middle of another answer
            return
        body = json.dumps(error_document(status, message)).encode()
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        self.transport.write(
            f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
        )
        self.transport.close()
