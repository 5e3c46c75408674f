"""Writes an OpenTelemetry span for each request as JSON lines, and assigns the request's id.

The spans follow the semantic conventions for HTTP servers and for generative AI, as `perilune traces export`
does. A request with a `traceparent` header (W3C Trace Context) becomes part of that trace.
"""

import json
import logging
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.types import Scope

from perilune.traces.otlp import ERROR, OK, encode_attributes, export_request

_log = logging.getLogger(__name__)

_SERVER = 2  # SpanKind
_PARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_REQUEST_ID = re.compile(rb"[\w.:/+=@-]{1,128}")
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


def request_id(headers: Mapping[bytes, bytes]) -> str:
    """Return the X-Request-Id of a request if it is short and has plain characters, otherwise a new one."""
    value = headers.get(b"x-request-id", b"")
    return value.decode() if _REQUEST_ID.fullmatch(value) else f"req_{secrets.token_hex(16)}"


class SpanWriter:
    """Writes spans to a file that only its owner can read.

    If a span cannot be written, for example because the disk is full, it is lost. Requests are not delayed.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        self._path, self._file = path, os.fdopen(os.open(path, flags, 0o600), "ab", buffering=0)
        self._torn = False  # whether the last line of the file is incomplete
        self._losing = False  # whether the last span was lost

    def close(self) -> None:
        self._file.close()

    def write(self, scope: Scope, name: str, status: int, began: int) -> None:
        """Write the span of a request that ends now.

        Args:
            name: id of the request.
            status: its HTTP status; 0 if the client disconnected before the status was sent.
            began: nanoseconds since 1970.
        """
        headers, route = dict(scope["headers"]), scope.get("route")
        parent = _PARENT.fullmatch(headers.get(b"traceparent", b""))
        path = "" if route is None else str(route.path)
        values: dict[str, Any] = {"http.request.method": scope["method"], "perilune.request_id": name}
        values |= {"http.route": path} if path else {}
        values |= {"http.response.status_code": status} if status else {}
        values |= (answer := _answer_attributes(path, scope.get("state", {})))
        model = answer.get("gen_ai.request.model")
        span = {
            "traceId": parent[1].decode() if parent else secrets.token_hex(16),
            "spanId": secrets.token_hex(8),
            "name": f"{_OPERATIONS[path]} {model}" if model else f"{scope['method']} {path}".strip(),
            "kind": _SERVER,
            "startTimeUnixNano": str(began),
            "endTimeUnixNano": str(time.time_ns()),
            "attributes": encode_attributes(values),
            "status": {"code": ERROR if status >= 500 else OK},
        } | ({"parentSpanId": parent[2].decode()} if parent else {})
        self._append(json.dumps(export_request([span])).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        data = b"\n" + line if self._torn else line
        try:
            written = self._file.write(data) or 0  # None if a pipe is full
            self._torn, losing, reason = 0 < written < len(data), written < len(data), "it is full"
        except OSError as error:
            losing, reason = True, str(error.strerror)
        if losing and not self._losing:
            _log.warning("spans are lost: %s cannot be written: %s", self._path, reason)
        self._losing = losing


def _answer_attributes(path: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a request that the engine has answered."""
    if path not in _OPERATIONS or "usage" not in state:
        return {}
    usage = state["usage"]
    return {
        "gen_ai.operation.name": _OPERATIONS[path],
        "gen_ai.provider.name": "perilune",
        "gen_ai.request.model": state["model"],
        "gen_ai.usage.input_tokens": usage.prompt,
        "gen_ai.usage.output_tokens": usage.completion,
        "perilune.cached_tokens": usage.cached,
    }
