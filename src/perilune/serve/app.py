"""The ASGI application: routes, error handlers and middleware."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import time, time_ns
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.errors import PeriluneError
from perilune.serve.errors import (
    CLIENT_CLOSED_REQUEST,
    handle_defect,
    handle_disconnect,
    handle_http_error,
    handle_invalid_query,
    handle_library_error,
)
from perilune.serve.guard import BodyLimits, Guard
from perilune.serve.model_service import ModelService
from perilune.serve.responses import DisconnectedError
from perilune.serve.service import Service
from perilune.serve.tracing import SpanWriter, request_id


def make_app(
    service: ModelService,
    *,
    token: str | None,
    bodies: BodyLimits,
    routers: Sequence[APIRouter],
    spans: SpanWriter | None = None,
) -> FastAPI:
    """Create the application that answers requests with `service`.

    Args:
        token: bearer token of requests; None if only this machine can connect.
        routers: the routes, besides /health and /metrics.
        spans: writes an OpenTelemetry span for each request.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.thread.start()
        yield
        service.thread.stop()
        service.close()
        if spans is not None:
            spans.close()

    async def handle_departure(request: Request, error: Exception) -> Response:
        service.metrics.disconnects.inc()
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    # No documentation page, because it would load scripts from other hosts.
    app = FastAPI(title="perilune serve", docs_url=None, redoc_url=None, lifespan=lifespan)
    for kind, answer in (
        (AnyHTTPException, handle_http_error),
        (PeriluneError, handle_library_error),
        (RequestValidationError, handle_invalid_query),
        (ClientDisconnect, handle_disconnect),
        (DisconnectedError, handle_departure),
        (Exception, handle_defect),
    ):
        app.add_exception_handler(kind, answer)
    app.add_middleware(
        Guard,
        token=token,
        bodies=bodies,
        draining=lambda: service.draining,
        open_paths=service.open_paths,
    )
    app.add_middleware(_RequestRecorder, service=service, spans=spans)
    for router in routers:
        app.include_router(router)

    @app.get("/health", response_model=None)
    async def health() -> Response:
        status = "failed" if service.thread.failure else "draining" if service.draining else "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return service.metrics.render_page(service.gauges())

    return app


def text_routes(service: Service) -> APIRouter:
    """Return the routes of a language model: chat, completions, tokenization and the list of models."""
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
        service.find_adapter(name)
        return card(name)

    return router


class _RequestRecorder:
    """Middleware that gives each request an id, counts it by route and status, and writes its span.

    Paths without a route count as "other".
    """

    def __init__(self, app: ASGIApp, *, service: ModelService, spans: SpanWriter | None) -> None:
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
            route = scope.get("route")  # set by the router
            self._service.metrics.count_request("other" if route is None else route.path, status)

        async def recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                count(message["status"])
                headers = [*message.get("headers", ()), (b"x-request-id", name.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, recorded)
        except Exception:
            if not status:  # `handle_defect` runs outside this middleware and answers with 500
                count(500)
            raise
        finally:
            if self._spans is not None:
                self._spans.write(scope, name, status, began)
