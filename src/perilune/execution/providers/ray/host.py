"""A machine on a Ray cluster, by way of the gateway that one of our jobs serves on the head node."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import BinaryIO

from perilune.execution.hosts.protocol import Answer, HostUnreachableError
from perilune.execution.providers.conversation import BrokenConnectionError, converse, cut_after

CONNECT_SECONDS = 10.0


class RayHost:
    """The machine called `machine`.

    Args:
        gateway: HOST:PORT.
        token: the machine's.
    """

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
        """As `Host.run`. A command does not end with the connection."""
        host, _, port = self.gateway.rpartition(":")
        asked = {"machine": self.machine, "token": self._token, "command": list(command)}
        try:
            with (
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as wire,
                cut_after(wire, timeout) as late,
                wire.makefile("rb") as answers,
            ):
                wire.settimeout(None)
                wire.sendall(json.dumps(asked).encode() + b"\n")
                try:
                    return converse(wire, answers, source, sink)
                except BrokenConnectionError as error:
                    why = f"no end within {timeout:g} s" if late.is_set() else str(error)
                    raise self._unreachable(why) from None
        except (OSError, ValueError) as error:
            raise self._unreachable(str(error) or type(error).__name__) from None

    def _unreachable(self, why: str) -> HostUnreachableError:
        return HostUnreachableError(f"cannot be reached through {self.gateway}: {why}", where=self.name)
