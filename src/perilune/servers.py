"""Requests to servers with OpenAI's interface: addresses, tokens, retries, and bounded answers in JSON."""

import json
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field

from perilune.errors import RequestError

ServerToken = Annotated[
    str | None,
    Field(description="name of the environment variable that holds the server's token; list it in `secrets`"),
]
"""Type of a field of settings that names the token of a server."""
MAX_SERVER_TEMPERATURE = 2.0  # that OpenAI's API, vLLM and `perilune serve` accept
_MAX_RETRY_DELAY_S = 30.0
_RETRY_STATUSES = frozenset({429, 502, 503, 504})
_MAX_ANSWER_BYTES = 256 << 20


class ServerError(Exception):
    """A request without a usable answer.

    Attributes:
        status: the HTTP status; 0 if the server does not answer, 200 if its answer is unusable.
    """

    def __init__(self, what: str, status: int) -> None:
        super().__init__(what)
        self.what, self.status = what, status

    @property
    def is_refusal(self) -> bool:
        """True if the request itself is wrong, so that another attempt is useless."""
        return 300 <= self.status < 500 and not self.may_pass

    @property
    def may_pass(self) -> bool:
        """True if the server does not answer or is busy, so that another attempt may succeed."""
        return self.status in (0, *_RETRY_STATUSES)


class NoJsonError(ServerError):
    """An answer with status 200 that is not JSON."""


class JsonClient:
    """A client that sends JSON or bytes, receives JSON, and retries while the server is busy. Thread-safe.

    Args:
        url: URL of the server's root or of its /v1, http or https.
        token: bearer token. No message contains it.
        timeout: seconds to wait for one answer.
        connections: maximum number of concurrent requests.
        attempts: maximum number of tries while the server is busy or does not answer.

    Raises:
        RequestError: when the URL is invalid, or httpx is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = 600.0,
        connections: int = 32,
        attempts: int = 6,
    ) -> None:
        require_httpx("url")
        import httpx

        self.url, self._transport_error = parse_server_url(url), httpx.TransportError
        self._attempts = attempts
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._client = httpx.Client(
            base_url=self.url, headers=headers, limits=limits, timeout=httpx.Timeout(timeout, connect=10.0)
        )

    def close(self) -> None:
        self._client.close()

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None = None,
        *,
        headers: Mapping[str, str] = {},
        retry: bool = True,
    ) -> Any:
        """Send a request and return the parsed answer. Without `retry`, it is sent once.

        Raises:
            ServerError: when the server refuses, fails, stays busy, or its answer is too large or not JSON.
        """
        attempts = self._attempts if retry else 1
        for attempt in range(1, attempts + 1):
            try:
                status, received, content = self._exchange(method, path, body, headers)
            except self._transport_error as error:
                # The message may name the host, but never the token.
                status, received, content = 0, {}, f"{type(error).__name__}: {error}".encode()
            if status == 200:
                return _parse_json(content)
            if status not in _RETRY_STATUSES and status:
                raise ServerError(f"the server refuses with {status}: {_error_message(content)}", status)
            if attempt < attempts:
                time.sleep(_retry_delay(received, attempt))
        what = f"answers {status}" if status else "does not answer"
        times = f", {attempts} times" if retry else ""
        raise ServerError(f"the server {what} ({_error_message(content)}){times}", status)

    def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, Mapping[str, str], bytes]:
        sent: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
        with self._client.stream(method, path, headers=dict(headers), **sent) as response:
            content = bytearray()
            for part in response.iter_bytes():
                content += part
                if len(content) > _MAX_ANSWER_BYTES:
                    raise ServerError(f"an answer is larger than {_MAX_ANSWER_BYTES >> 20} MiB", 200)
            return response.status_code, response.headers, bytes(content)


def require_httpx(where: str) -> None:
    """Check that httpx is installed.

    Raises:
        RequestError: when it is not. `where` is the setting that needs it.
    """
    if find_spec("httpx") is None:
        what = "a server needs the package httpx, which is not installed"
        raise RequestError(what, where=where, remedy="pip install 'perilune[remote]'")


def parse_server_url(url: str) -> str:
    """Return the URL without a trailing /v1.

    Raises:
        RequestError: when it is malformed, is not http or https, or contains a password.
    """
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a malformed host or port
        is_valid = False
    if not is_valid or parts.query or parts.fragment:
        raise RequestError(f"{url!r} is not the URL of a server", remedy="use the form http://HOST:PORT/v1")
    if parts.username or parts.password:
        raise RequestError(
            "the URL contains a password, which would be written to files",
            remedy="name an environment variable that holds the token",
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _parse_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise NoJsonError("the server's answer is not JSON", 200) from None


def _retry_delay(headers: Mapping[str, str], attempt: int) -> float:
    """Return the seconds until the next attempt: as the server requests, otherwise doubling each time."""
    try:
        seconds = float(headers.get("Retry-After", ""))
    except ValueError:  # a date, or nothing
        seconds = 0.25 * 2**attempt
    return min(max(seconds, 0.0), _MAX_RETRY_DELAY_S)


def _error_message(content: bytes) -> str:
    """Return the message of an error body as one short line."""
    text = content.decode(errors="replace")
    try:
        document = json.loads(text)
        error = document.get("error", document) if isinstance(document, dict) else document
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, RecursionError):
        pass
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:299] + "…"
