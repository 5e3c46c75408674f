"""The connection to an OpenEnv server. Every wait has a timeout, and every error names its cause."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from perilune.environments.core.protocol import EpisodeFailedError
from perilune.files import reject_constant

MAX_RESPONSE_BYTES = 1 << 20  # limit on a response
CLOSE_TIMEOUT_S = 0.5


class Connection:
    """A WebSocket to the server at `url`, which keeps one environment session per connection.

    Raises:
        EpisodeFailedError: blaming the environment, from every method.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self._url, self._seconds = url, seconds

    def __enter__(self) -> Connection:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        self._connection_errors = (OSError, EOFError, WebSocketException)  # a TimeoutError is an OSError
        try:
            self._socket = connect(
                "ws" + self._url.removeprefix("http") + "/ws",
                open_timeout=self._seconds,
                close_timeout=CLOSE_TIMEOUT_S,
                max_size=MAX_RESPONSE_BYTES,
                proxy=None,
            )
        except self._connection_errors as error:
            raise _failure(f"the server at {self._url} cannot be reached: {_describe_error(error)}") from None
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._socket.send('{"type": "close"}')
        except self._connection_errors:
            pass
        finally:
            self._socket.close()

    def request(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Send a message and return the response's data; None if the server rejects the data as invalid."""
        try:
            self._socket.send(json.dumps({"type": kind, "data": data}))
            text = self._socket.recv(timeout=self._seconds)
        except TimeoutError:
            raise _failure(f"the server did not answer a {kind} within {self._seconds:g} s") from None
        except self._connection_errors as error:
            raise _failure(
                f"the server closed the connection after a {kind}: {_describe_error(error)}"
            ) from None
        response = _parse_document(text)
        received = response.get("data")
        if not isinstance(received, dict):
            raise _failure(f"the server's response to a {kind} has no data")
        if response.get("type") == "error":
            if kind == "step" and received.get("code") == "VALIDATION_ERROR":
                return None
            raise _failure(f"the server: {received.get('code')}: {str(received.get('message'))[:200]}")
        return received


def fetch_action_fields(url: str, seconds: float) -> list[str]:
    """Return the required fields of an action, from the server's schema.

    Raises:
        EpisodeFailedError: blaming the environment, if the server does not provide the schema.
    """
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    link = kind(parts.hostname or "", parts.port, timeout=seconds)
    try:
        link.request("GET", f"{parts.path}/schema")
        text = link.getresponse().read(MAX_RESPONSE_BYTES)
    except (OSError, HTTPException) as error:
        raise _failure(f"the server's schema cannot be read: {_describe_error(error)}") from None
    finally:
        link.close()
    action = _parse_document(text).get("action")
    fields = action.get("required") if isinstance(action, dict) else None
    if not isinstance(fields, list):
        raise _failure("the server's schema lists no required field of an action; set environment.action")
    return [str(field) for field in fields]


def _parse_document(text: str | bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(text, parse_constant=reject_constant)
    except (ValueError, RecursionError) as error:
        raise _failure(f"the server's response is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise _failure("the server's response is not a JSON object")
    return document


def _failure(reason: str) -> EpisodeFailedError:
    return EpisodeFailedError("environment", reason)


def _describe_error(error: BaseException) -> str:
    return str(error) or type(error).__name__
