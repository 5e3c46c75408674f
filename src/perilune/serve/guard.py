"""Middleware that checks every request first: its token, its host, and the size of its body.

It is pure ASGI: it reads a body in chunks, can refuse it before the rest has arrived, and buffers nothing.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.serve.address import has_token, is_for_this_machine
from perilune.serve.errors import ApiError, error_document

HEALTH_PATH = "/health"  # needs no token


@dataclass(frozen=True)
class BodyLimits:
    """Limits on request bodies.

    Attributes:
        seconds: time to receive the whole body.
    """

    max_bytes: int
    seconds: float = 30.0

    @property
    def max_discarded_bytes(self) -> int:
        """Number of bytes to read of a body that is too large, so that the client sees the error."""
        return 16 * self.max_bytes


class Guard:
    """Refuses invalid requests before they reach the application.

    Args:
        token: bearer token of requests, or None if only this machine can connect.
        draining: returns whether the server is shutting down.
        open_paths: paths that need no token.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        bodies: BodyLimits,
        draining: Callable[[], bool],
        open_paths: frozenset[str] = frozenset(),
    ) -> None:
        self._app = app
        self._token = None if token is None else token.encode()
        self._bodies = bodies
        self._draining = draining
        self._open = {HEALTH_PATH, *open_paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        refusal = self._check_access(scope, headers)
        if refusal is None and scope["method"] == "POST":
            refusal = self._check_post(headers)
        if refusal is None:
            await self._app(scope, self._limit_body(receive), send)
            return
        if scope["method"] == "POST":
            await self._discard(receive)
        await refusal(scope, receive, send)

    def _check_access(self, scope: Scope, headers: dict[bytes, bytes]) -> JSONResponse | None:
        if self._token is None:
            if not is_for_this_machine(headers):
                return _error(403, "this server only answers requests to localhost", code="wrong_host")
        elif scope["path"] not in self._open and not has_token(headers, self._token):
            return _error(
                401,
                "the token is missing or wrong; send Authorization: Bearer TOKEN",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return None

    def _check_post(self, headers: dict[bytes, bytes]) -> JSONResponse | None:
        if self._draining():
            return _error(503, "the server is shutting down", headers={"Retry-After": "10"})
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        length = headers.get(b"content-length", b"0")
        # Requests without a body need no content type, unless a web page sent them: these have an Origin.
        empty = length == b"0" and b"transfer-encoding" not in headers and b"origin" not in headers
        if kind != b"application/json" and not (empty and not kind):
            # Requiring JSON also makes browsers send a CORS preflight, which this server does not grant.
            return _error(415, "the body must have Content-Type: application/json")
        if length.isdigit() and int(length) > self._bodies.max_bytes:
            return _error(413, self._too_large_message(), code="body_too_large")
        return None

    def _limit_body(self, receive: Receive) -> Receive:
        """Wrap `receive` to raise an `ApiError` when a body is too large or too slow."""
        received = 0
        deadline = asyncio.get_running_loop().time() + self._bodies.seconds
        complete = False

        async def counted() -> Message:
            nonlocal received, complete
            if complete:
                return await receive()  # waits for the end of the connection, without a deadline
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                late = f"the body did not arrive within {self._bodies.seconds:g} seconds"
                raise ApiError(408, late) from None
            received += len(message.get("body", b""))
            complete = message["type"] != "http.request" or not message.get("more_body", False)
            if received > self._bodies.max_bytes:
                if not complete:
                    await self._discard(receive)
                raise ApiError(413, self._too_large_message(), code="body_too_large")
            return message

        return counted

    async def _discard(self, receive: Receive) -> None:
        """Discard the rest of the body: a client that is disconnected while it sends sees no response."""
        remaining = self._bodies.max_discarded_bytes
        try:
            async with asyncio.timeout(self._bodies.seconds):
                while remaining > 0:
                    message = await receive()
                    remaining -= len(message.get("body", b""))
                    if message["type"] != "http.request" or not message.get("more_body", False):
                        return
        except TimeoutError:
            return

    def _too_large_message(self) -> str:
        return f"the body is larger than {self._bodies.max_bytes:,} bytes"


def _error(
    status: int, message: str, *, code: str | None = None, headers: dict[str, Any] | None = None
) -> JSONResponse:
    return JSONResponse(error_document(status, message, code=code), status, headers)
