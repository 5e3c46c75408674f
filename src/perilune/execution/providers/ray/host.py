"""A machine on a Ray cluster as a host, through the gateway that one of our jobs serves on the head node."""

import hmac
import json
import secrets
import socket
from collections.abc import Sequence
from typing import Any, BinaryIO

from perilune.execution.hosts.protocol import Answer, HostRefusedError, HostUnreachableError
from perilune.execution.providers.conversation import BrokenConnectionError, close_after, run_conversation
from perilune.execution.providers.frames import Kind, read_frame, token_proof

CONNECT_SECONDS = 10.0


class RayHost:
    """The machine named `machine`."""

    def __init__(self, gateway: str, machine: str, token: str) -> None:
        self.gateway, self.machine, self._token = gateway, machine, token
        self.name = f"ray:{machine}"

    def run(
        self,
        command: Sequence[str],
        *,
        source: BinaryIO | None = None,
        sink: BinaryIO | None = None,
        timeout: float = 60.0,
    ) -> Answer:
        """Implement `Host.run`. A command does not end with the connection."""
        host, _, port = self.gateway.rpartition(":")
        try:
            with (
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as wire,
                close_after(wire, timeout) as late,
                wire.makefile("rb") as answers,
            ):
                try:
                    nonce = self._authenticate(wire, answers)
                    wire.settimeout(None)
                    proof = token_proof(self._token, "command", nonce, *command)
                    _send(wire, {"command": list(command), "nonce": nonce, "proof": proof})
                    return run_conversation(wire, answers, source, sink)
                except BrokenConnectionError as error:
                    why = f"no end within {timeout:g} s" if late.is_set() else str(error)
                    raise self._unreachable(why) from None
        except HostRefusedError:  # a ValueError too
            raise
        except (OSError, ValueError) as error:
            raise self._unreachable(str(error) or type(error).__name__) from None

    def _authenticate(self, wire: socket.socket, answers: BinaryIO) -> str:
        """Make the machine prove its identity before it gets a command.

        Returns:
            The nonce for the proof of the request that follows.

        Raises:
            HostRefusedError: another service answers.
            BrokenConnectionError: there is no answer.
        """
        nonce = secrets.token_hex(16)
        _send(wire, {"machine": self.machine, "nonce": nonce})
        kind, data = read_frame(answers) or (Kind.ERRORS, b"the connection broke")
        if kind is Kind.ERRORS:
            raise BrokenConnectionError(data.decode(errors="replace").strip())
        hello = json.loads(data) if kind is Kind.HELLO else {}
        proof = str(hello.get("proof")) if isinstance(hello, dict) else ""
        if not hmac.compare_digest(proof.encode(), token_proof(self._token, "machine", nonce).encode()):
            raise HostRefusedError(
                f"the service at {self.gateway} is not this machine's gateway",
                where=self.name,
                remedy="check which service listens on that port of the head node, or set other ports in"
                " `gateway` and `listen`",
            )
        return str(hello["nonce"])

    def _unreachable(self, why: str) -> HostUnreachableError:
        return HostUnreachableError(f"cannot be reached through {self.gateway}: {why}", where=self.name)


def _send(wire: socket.socket, document: dict[str, Any]) -> None:
    wire.sendall(json.dumps(document).encode() + b"\n")
