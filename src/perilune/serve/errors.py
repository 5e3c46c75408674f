"""Whatever goes wrong, as the error body that OpenAI's clients understand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from perilune.errors import PeriluneError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_SHOWN = 200  # characters of what was sent that are told back


class ApiError(HTTPException):
    """A request that is answered with an error.

    Args:
        status: HTTP status.
        message: what is wrong, with the value that was seen.
        param: the field that is wrong.
        code: a word for programs, such as "context_length_exceeded".
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


def error_document(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error body."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    told = message.encode(errors="replace").decode()  # what is told back may hold half a character
    return {"error": {"message": told, "type": kind, "param": param, "code": code}}


def answer_error(request: Request, error: Exception) -> JSONResponse:
    """The response to any `HTTPException`, ours and the framework's."""
    assert isinstance(error, AnyHTTPException)
    document = error_document(
        error.status_code, error.detail, getattr(error, "param", None), getattr(error, "code", None)
    )
    return JSONResponse(document, error.status_code, error.headers)


def answer_invalid(request: Request, error: Exception) -> JSONResponse:
    """The response to a body that is no JSON, or does not fit: the first thing wrong with it."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:]) or None
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        message = f"the body is not JSON: {reason}, at character {first['loc'][-1]}"
        return JSONResponse(error_document(400, message, None, "invalid_json"), 400)
    if first["type"] == "extra_forbidden":
        message = f"unrecognised argument: {_shorten(str(field))}"
    elif first["type"] == "missing":
        message = f"{field} is missing" if field else "the body is empty"
    else:
        told = first["msg"].removeprefix("Value error, ")
        message = f"{_shorten(field)}: {told}" if field else told
    return JSONResponse(error_document(400, message, field and _shorten(field)), 400)


def answer_refused(request: Request, error: Exception) -> JSONResponse:
    """The response to what the library refused or failed at."""
    assert isinstance(error, PeriluneError)
    told = f"{error.what} ({error.remedy})" if error.remedy else error.what
    status = 400 if error.exit_code == 2 else 500
    return JSONResponse(error_document(status, told, error.where or None), status)


def answer_unexpected(request: Request, error: Exception) -> JSONResponse:
    """The response to a defect; what it was stands in the server's log."""
    return JSONResponse(error_document(500, "the server failed; its log says more"), 500)


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
