"""The server that programs call instead of a model server. Each session has a secret path of its own.

A call waits until the policy has taken a turn. It listens on loopback only, and bounds every request: the
programs that call it are not trusted.
"""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue

from perilune.environments.program.chat import (
    MAX_BODY_BYTES,
    ChatAnswer,
    ChatRequest,
    RefusedCallError,
    error_document,
    read_request,
)

_READ_TIMEOUT_S = 30.0  # seconds without a byte of a request
_MAX_WAITING_CALLS = 64  # calls of a session at the same time
_MODELS = b'{"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": ""}]}'


@dataclass(slots=True, eq=False)
class Call:
    """A call that waits for its answer.

    Attributes:
        reply: takes the answer; None refuses the call, since the session is over.
        made_at: when the program made the call (time.monotonic).
    """

    request: ChatRequest
    reply: SimpleQueue[ChatAnswer | None] = field(default_factory=SimpleQueue)
    made_at: float = field(default_factory=time.monotonic)


class Gateway:
    """The server of all sessions of a process."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._server = _Server(("127.0.0.1", 0), _make_handler(self._sessions))
        threading.Thread(target=self._server.serve_forever, name="gateway", daemon=True).start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def open(self, on_call: Callable[[Call], None]) -> str:
        """Open a session and return its key, the first part of its paths.

        Args:
            on_call: receives each call, in a thread of its own.
        """
        key = secrets.token_hex(16)
        self._sessions[key] = _Session(on_call)
        return key

    def close_session(self, key: str) -> None:
        """Refuse all calls of a session from now on."""
        self._sessions.pop(key).close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Do nothing: a program that hangs up is no error of this process."""


class _Session:
    """The calls of one session that wait."""

    def __init__(self, on_call: Callable[[Call], None]) -> None:
        self._on_call = on_call
        self._lock = threading.Lock()
        self._waiting: set[Call] = set()
        self._closed = False

    def answer(self, request: ChatRequest) -> ChatAnswer | None:
        """Wait for the answer; None if there will be none."""
        call = Call(request)
        with self._lock:
            if self._closed or len(self._waiting) >= _MAX_WAITING_CALLS:
                return None
            self._waiting.add(call)
        self._on_call(call)
        answer = call.reply.get()
        with self._lock:
            self._waiting.discard(call)
        return answer

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for call in self._waiting:
                call.reply.put(None)


def _make_handler(sessions: dict[str, _Session]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _READ_TIMEOUT_S

        def do_GET(self) -> None:
            _, key, path = self._parts()
            if key in sessions and path == "v1/models":
                self._send(200, _MODELS)
            else:
                self._send(404, error_document("no such path"))

        def do_POST(self) -> None:
            _, key, path = self._parts()
            line = sessions.get(key)
            size = self.headers.get("Content-Length", "")
            if not size.isascii() or not size.isdigit() or int(size) > MAX_BODY_BYTES:
                self.close_connection = True
                self._send(413, error_document(f"a request has a Content-Length of at most {MAX_BODY_BYTES}"))
                return
            body = self.rfile.read(int(size))
            if line is None or path != "v1/chat/completions":
                self._send(404, error_document("this gateway serves chat completions only"))
                return
            try:
                answer = line.answer(read_request(body))
            except RefusedCallError as refusal:
                self._send(400, error_document(str(refusal)))
                return
            if answer is None:
                self._send(400, error_document("the session has ended, or has too many calls"))
            elif answer.request.stream:
                self._send(200, answer.events(), "text/event-stream")
            else:
                self._send(200, answer.document())

        def _parts(self) -> list[str]:
            return [*self.path.split("?")[0].split("/", 2), "", ""][:3]

        def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
            try:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:  # the program has gone
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Do nothing: a run does not log a program's requests."""

    return Handler
