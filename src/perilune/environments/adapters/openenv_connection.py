"""A conversation with an OpenEnv server: no message is waited for too long, and what is wrong has a name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from perilune.environments.core.protocol import EpisodeFailedError

MOST_BYTES = 1 << 20  # of an answer
CLOSING_SECONDS = 0.5


class Connection:
    """A WebSocket to the server at `url`, which holds one session of the environment for it.

    Raises:
        EpisodeFailedError: of the environment, from whatever is asked.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self._url, self._seconds = url, seconds

    def __enter__(self) -> Connection:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        self._broken = (OSError, EOFError, WebSocketException)  # a TimeoutError is an OSError
        try:
            self._socket = connect(
                "ws" + self._url.removeprefix("http") + "/ws",
                open_timeout=self._seconds,
                close_timeout=CLOSING_SECONDS,
                max_size=MOST_BYTES,
                proxy=None,
            )
        except self._broken as error:
            raise _failed(f"the server at {self._url} cannot be reached: {_said(error)}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._socket.send('{"type": "close"}')
        except self._broken:
            pass
        finally:
            self._socket.close()

    def ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """What the server answers to a message; None where it says that the data of it are not valid."""
        try:
            self._socket.send(json.dumps({"type": kind, "data": data}))
            text = self._socket.recv(timeout=self._seconds)
        except TimeoutError:
            raise _failed(f"the server did not answer a {kind} within {self._seconds:g} s") from None
        except self._broken as error:
            raise _failed(f"the server left after a {kind}: {_said(error)}") from None
        answer = _document(text)
        found = answer.get("data")
        if not isinstance(found, dict):
            raise _failed(f"the server's answer to a {kind} has no data")
        if answer.get("type") == "error":
            if kind == "step" and found.get("code") == "VALIDATION_ERROR":
                return None
            raise _failed(f"the server: {found.get('code')}: {str(found.get('message'))[:200]}")
        return found


def action_fields(url: str, seconds: float) -> list[str]:
    """Fields that an action must have, by the server's own schema.

    Raises:
        EpisodeFailedError: of the environment, when the server does not say.
    """
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    link = kind(parts.hostname or "", parts.port, timeout=seconds)
    try:
        link.request("GET", f"{parts.path}/schema")
        text = link.getresponse().read(MOST_BYTES)
    except (OSError, HTTPException) as error:
        raise _failed(f"the server does not tell its schema: {_said(error)}") from None
    finally:
        link.close()
    action = _document(text).get("action")
    fields = action.get("required") if isinstance(action, dict) else None
    if not isinstance(fields, list):
        raise _failed("the server's schema names no field that an action needs; set environment.action")
    return [str(field) for field in fields]


def _document(text: str | bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise _failed(f"the server's answer is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise _failed("the server's answer is no JSON object")
    return found


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number that JSON has")


def _failed(reason: str) -> EpisodeFailedError:
    return EpisodeFailedError("environment", reason)


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
