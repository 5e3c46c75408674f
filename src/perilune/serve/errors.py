"""Errors as the JSON bodies of OpenAI's API."""

from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.responses import Response

from perilune.errors import PeriluneError
from perilune.serve.engine_thread import StoppedError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_OPTIONAL = {  # routes that only some servers have
    "/v1/embeddings": "start it with --embeddings mean",
    "/v1/load_lora_adapter": "start it with --adapters-from FOLDER",
    "/v1/unload_lora_adapter": "start it with --adapters-from FOLDER",
    "/v1/audio/speech": "serve a speech model",
}
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that closed the connection
_MAX_SHOWN_CHARS = 200  # characters of a request's value that an error message repeats


class ApiError(HTTPException):
    """An error response to a request.

    Args:
        status: the HTTP status.
        message: the problem, with the invalid value.
        param: the invalid field.
        code: an identifier for programs, such as "context_length_exceeded".
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code


def unknown_model_error(name: str, *known: str) -> ApiError:
    """Return error 404 for an unknown model. The message lists the `known` models."""
    message = f"no model {shorten(name)!r}; this server has {', '.join(map(repr, known))}"
    return ApiError(404, message, param="model", code="model_not_found")


def error_document(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the error as OpenAI's error body."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {
        "error": {
            "message": _encodable(message),
            "type": kind,
            "param": param and _encodable(param),
            "code": code,
        }
    }


async def handle_http_error(request: Request, error: Exception) -> JSONResponse:
    """Return the response to an `ApiError`, or to an `HTTPException` of the framework."""
    assert isinstance(error, AnyHTTPException)
    message, path = error.detail, request.url.path
    if path in _OPTIONAL and not isinstance(error, ApiError) and error.status_code == 404:
        message = f"this server has no route {path}: {_OPTIONAL[path]}"
    document = error_document(
        error.status_code, message, getattr(error, "param", None), getattr(error, "code", None)
    )
    return JSONResponse(document, error.status_code, error.headers)


async def handle_library_error(request: Request, error: Exception) -> JSONResponse:
    """Return the response to a `PeriluneError`. Its place is `param` only if it is a field of the request."""
    assert isinstance(error, PeriluneError)
    status = http_status(error)
    fields = getattr(request.state, "fields", ())
    param = error.where if error.where.partition(".")[0] in fields else None
    message = f"{error.what} ({error.remedy})" if error.remedy else error.what
    return JSONResponse(error_document(status, message, param), status)


def http_status(error: PeriluneError) -> int:
    if isinstance(error, StoppedError):
        return 503
    return 400 if error.exit_code == 2 else 500


async def handle_invalid_query(request: Request, error: Exception) -> JSONResponse:
    """Return the response to an invalid parameter in the query of a URL."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return JSONResponse(error_document(400, f"{name}: {first['msg']}", name), 400)


async def handle_disconnect(request: Request, error: Exception) -> Response:
    """Return the response to a client that left before its body was complete; only the log shows it."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def handle_defect(request: Request, error: Exception) -> JSONResponse:
    """Return the response to a defect in the server. uvicorn logs the error."""
    headers = {"X-Request-Id": request.state.request_id}
    return JSONResponse(error_document(500, "the server failed; see its log"), 500, headers)


def shorten(text: str) -> str:
    """Shorten a value of a request to the length that error messages repeat."""
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 1] + "…"


def _encodable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()
