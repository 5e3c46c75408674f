"""A client of one tool server that speaks the Model Context Protocol over standard input and output.

https://modelcontextprotocol.io: JSON-RPC 2.0, one message a line. The server is not trusted: every wait has a
timeout, and every message a largest size.
"""

import json
import os
import select
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from perilune.sandbox.programs import Streams

VERSION = "2025-06-18"  # of the protocol; the server may choose another
_MOST_BYTES = 1 << 20  # of a message
_READ = 65536
_MOST_PAGES = 64


class ServerBrokeError(Exception):
    """The server ended, hangs, or violates the protocol."""


class ToolServer:
    """A running server.

    Args:
        start: starts it on these streams.
        seconds: longest wait for a response.
    """

    def __init__(self, start: Callable[[Streams], Any], seconds: float) -> None:
        self._seconds = seconds
        self._buffer = b""
        self._number = 0
        given, self._requests = os.pipe()
        self._responses, output = os.pipe()
        os.set_blocking(self._requests, False)
        try:
            self.program = start(Streams(given, output))
        except BaseException:
            os.close(self._requests)
            os.close(self._responses)
            raise

    def initialize(self) -> None:
        """Open the session.

        Raises:
            ServerBrokeError: as `call`.
        """
        client = {"name": "perilune", "version": "1"}
        self._request("initialize", {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": client})
        self._send({"method": "notifications/initialized"})

    def tools(self) -> Iterator[dict[str, Any]]:
        """The server's tools, each with its name, description and parameters.

        Raises:
            ServerBrokeError: as `call`, and for a malformed list.
        """
        cursor: dict[str, Any] = {}
        for _ in range(_MOST_PAGES):
            page = self._request("tools/list", cursor)
            try:
                for tool in page["tools"]:
                    about = {"description": tool["description"]} if tool.get("description") else {}
                    yield {"name": tool["name"], **about, "parameters": tool["inputSchema"]}
            except (KeyError, TypeError, AttributeError):
                raise ServerBrokeError("the list of tools is malformed") from None
            if not page.get("nextCursor"):
                return
            cursor = {"cursor": page["nextCursor"]}
        raise ServerBrokeError(f"the list of tools has more than {_MOST_PAGES} pages")

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text that a tool returns. An error that the server reports is a text, too.

        Raises:
            ServerBrokeError: when the server ends, sends no response in time, or a malformed one.
        """
        result = self._request("tools/call", {"name": name, "arguments": arguments})
        if "error" in result:
            return f"error: {result['error']}"
        try:
            parts = [
                part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in result["content"]
            ]
            return ("error: " if result.get("isError") else "") + "\n".join(parts)
        except (KeyError, TypeError):
            raise ServerBrokeError("the result of a tool is malformed") from None

    def close(self) -> None:
        os.close(self._requests)
        self.program.end()
        os.close(self._responses)

    def _request(self, method: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """The result of a request; {"error": message} if the server refuses it."""
        self._number += 1
        until = time.monotonic() + self._seconds
        self._send({"id": self._number, "method": method, "params": parameters})
        while True:
            message = self._receive(until)
            if "method" in message:
                if "id" in message:  # a request of the server; this client offers nothing
                    refusal = {"code": -32601, "message": "not supported"}
                    self._send({"id": message["id"], "error": refusal})
            elif message.get("id") == self._number:
                break
        if isinstance(error := message.get("error"), dict):
            if method != "tools/call":
                raise ServerBrokeError(f"{method} failed: {error.get('message')}")
            return {"error": str(error.get("message"))}
        if not isinstance(result := message.get("result"), dict):
            raise ServerBrokeError("a response has no result")
        return result

    def _send(self, message: Mapping[str, Any]) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
        until = time.monotonic() + self._seconds
        try:
            while data:
                self._wait([], [self._requests], until)
                data = data[os.write(self._requests, data) :]
        except OSError:
            raise ServerBrokeError("the server closed its input") from None

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            self._wait([self._responses], [], until)
            if not (data := os.read(self._responses, _READ)):
                raise ServerBrokeError("the server ended")
            self._buffer += data
            if len(self._buffer) > _MOST_BYTES:
                raise ServerBrokeError(f"a message has more than {_MOST_BYTES} bytes")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ServerBrokeError("a message is not a JSON object")
        return message

    def _wait(self, readable: list[int], writable: list[int], until: float) -> None:
        ready = select.select(readable, writable, [], max(until - time.monotonic(), 0.0))
        if not any(ready):
            raise ServerBrokeError(f"the server did not answer within {self._seconds:g} s")
