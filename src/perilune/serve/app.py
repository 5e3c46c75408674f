"""The ASGI application: routes, error handlers and middleware."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from time import time, time_ns
from typing import Any, Protocol

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.errors import PeriluneError
from perilune.serve.engine_thread import EngineThread
from perilune.serve.errors import (
    answer_error,
    answer_gone,
    answer_invalid,
    answer_refused,
    answer_unexpected,
)
from perilune.serve.guard import BodyLimits, Guard
from perilune.serve.metrics import Metrics
from perilune.serve.service import Service
from perilune.serve.tracing import Spans, request_id


class AnyService(Protocol):
    """The interface of a service that answers requests, for all kinds of models.

    Attributes:
        thread: the thread of its engine.
        answering: requests whose answers are not sent completely.
        draining: whether the server is shutting down.
        open_paths: paths that need no token.
    """

    thread: EngineThread
    answering: int
    draining: bool
    open_paths: frozenset[str]

    @property
    def metrics(self) -> Metrics:
        """The metrics of this service."""

    def figures(self) -> Mapping[str, float]:
        """Current values for /metrics."""

    def abort_all(self, reason: str) -> None:
        """Stop all requests; their clients get `reason` as the error."""

    def close(self) -> None:
        """Stop what the service started."""


def make_app(
    service: AnyService,
    *,
    token: str | None,
    bodies: BodyLimits,
    routers: Sequence[APIRouter],
    spans: Spans | None = None,
) -> FastAPI:
    """The application that answers with `service`.

    Args:
        token: bearer token of requests; None if only this machine can connect.
        routers: the routes, besides /health and /metrics.
        spans: gets a span of each request.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.thread.start()
        yield
        service.thread.stop()
        service.close()
        if spans is not None:
            spans.close()

    # No documentation page, because it would load scripts from other hosts.
    app = FastAPI(title="perilune serve", docs_url=None, redoc_url=None, lifespan=lifespan)
    for kind, answer in (
        (AnyHTTPException, answer_error),
        (PeriluneError, answer_refused),
        (RequestValidationError, answer_invalid),
        (ClientDisconnect, answer_gone),
        (Exception, answer_unexpected),
    ):
        app.add_exception_handler(kind, answer)
    app.add_middleware(
        Guard,
        token=token,
        bodies=bodies,
        draining=lambda: service.draining,
        open_paths=service.open_paths,
    )
    app.add_middleware(_Recorded, service=service, spans=spans)
    for router in routers:
        app.include_router(router)

    @app.get("/health", response_model=None)
    async def health() -> Response:
        status = "failed" if service.thread.failure else "draining" if service.draining else "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return service.metrics.response(service.figures())

    return app


def text_routes(service: Service) -> APIRouter:
    """The routes of a text model."""
    router = APIRouter()
    started = int(time())

    for path, reply in (
        ("/v1/chat/completions", service.chat),
        ("/v1/completions", service.complete),
        ("/tokenize", service.tokenize),
        ("/detokenize", service.detokenize),
    ):
        router.post(path, response_model=None)(reply)

    def card(name: str) -> dict[str, Any]:
        base = service.model.name
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "perilune",
            "max_model_len": service.model.context,
            "root": str(service.model.adapters.get(name, base)),
            "parent": None if name == base else base,
        }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in service.model.names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.adapter_of(name)
        return card(name)

    return router


class _Recorded:
    """Gives each request an id, counts it by route and status, and writes its span.

    A path that is not served counts as "other".
    """

    def __init__(self, app: ASGIApp, *, service: AnyService, spans: Spans | None) -> None:
        self._app, self._service, self._spans = app, service, spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name, began, status = request_id(dict(scope["headers"])), time_ns(), 0
        scope.setdefault("state", {})["request_id"] = name

        def count(answered: int) -> None:
            nonlocal status
            status = answered
            route = scope.get("route")  # the router sets it
            self._service.metrics.answered("other" if route is None else route.path, status)

        async def recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                count(message["status"])
                headers = [*message.get("headers", ()), (b"x-request-id", name.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, recorded)
        except Exception:
            if not status:  # `answer_unexpected` answers outside of all middleware
                count(500)
            raise
        finally:
            if self._spans is not None:
                self._spans.write(scope, name, status, began)
