"""A client of one tool server that speaks the Model Context Protocol over standard input and output.

https://modelcontextprotocol.io: JSON-RPC 2.0, one message a line. The server is not trusted: every wait has a
timeout, and every message a largest size.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from perilune.sandbox.channel import BrokenChannelError, ProcessSocket
from perilune.sandbox.programs import Streams

PROTOCOL_VERSION = "2025-06-18"  # of the protocol; the server may choose another
_MAX_MESSAGE_BYTES = 1 << 20  # of a message
_MAX_PAGES = 64


class ToolServerError(Exception):
    """The server ended, hangs, or violates the protocol."""


class _Socket(ProcessSocket):
    """The server's standard input and output. Its program knows how it ends, and what it writes to stderr."""

    def exit_code(self) -> None:
        return None


class ToolServer:
    """A running server.

    Args:
        start: starts it on these streams.
        seconds: longest wait for a response.
    """

    def __init__(self, start: Callable[[Streams], Any], seconds: float) -> None:
        self._seconds = seconds
        self._number = 0
        self._socket = _Socket("the server", _MAX_MESSAGE_BYTES)
        end, errors = self._socket.child_ends
        os.close(errors)
        try:
            self.program = start(Streams(end, os.dup(end)))
        except BaseException:
            self._socket.close()
            raise

    def initialize(self) -> None:
        """Open the session.

        Raises:
            ToolServerError: as `call`.
        """
        client = {"name": "perilune", "version": "1"}
        self._request(
            "initialize", {"protocolVersion": PROTOCOL_VERSION, "capabilities": {}, "clientInfo": client}
        )
        self._send({"method": "notifications/initialized"})

    def tools(self) -> Iterator[dict[str, Any]]:
        """Yield the server's tools, each with its name, description and parameters.

        Raises:
            ToolServerError: as `call`, and for a malformed list.
        """
        cursor: dict[str, Any] = {}
        for _ in range(_MAX_PAGES):
            page = self._request("tools/list", cursor)
            try:
                for tool in page["tools"]:
                    description = {"description": tool["description"]} if tool.get("description") else {}
                    yield {"name": tool["name"], **description, "parameters": tool["inputSchema"]}
            except (KeyError, TypeError, AttributeError):
                raise ToolServerError("the list of tools is malformed") from None
            if not page.get("nextCursor"):
                return
            cursor = {"cursor": page["nextCursor"]}
        raise ToolServerError(f"the list of tools has more than {_MAX_PAGES} pages")

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text that a tool returns. An error that the server reports is a text, too.

        Raises:
            ToolServerError: when the server ends, sends no response in time, or a malformed one.
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
            raise ToolServerError("the result of a tool is malformed") from None

    def close(self) -> None:
        self._socket.close()
        self.program.end()

    def _request(self, method: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the result of a request; {"error": message} if the server refuses it."""
        self._number += 1
        deadline = time.monotonic() + self._seconds
        self._send({"id": self._number, "method": method, "params": parameters})
        while True:
            try:
                message = self._socket.receive(max(deadline - time.monotonic(), 0.0))
            except BrokenChannelError as broken:
                raise ToolServerError(str(broken)) from None
            if "method" in message:
                if "id" in message:  # a request of the server; this client offers nothing
                    refusal = {"code": -32601, "message": "not supported"}
                    self._send({"id": message["id"], "error": refusal})
            elif message.get("id") == self._number:
                break
        if isinstance(error := message.get("error"), dict):
            if method != "tools/call":
                raise ToolServerError(f"{method} failed: {error.get('message')}")
            return {"error": str(error.get("message"))}
        if not isinstance(result := message.get("result"), dict):
            raise ToolServerError("a response has no result")
        return result

    def _send(self, message: Mapping[str, Any]) -> None:
        self._socket.send({"jsonrpc": "2.0", **message})
