"""Provider `fake`: the fake cloud for the control plane, and its machines as hosts."""

import http.client
import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from perilune.errors import PeriluneError
from perilune.execution.hosts.protocol import Answer, Host, HostUnreachableError
from perilune.execution.processes import Presence
from perilune.execution.providers.conversation import BrokenConnectionError, close_after, run_conversation
from perilune.execution.providers.protocol import (
    Capabilities,
    MachineRequest,
    MachineStatus,
    NoCapacityError,
    Offer,
    ProviderRefusedError,
    ProviderUnreachableError,
    RentedMachine,
    Sighting,
)

CALL_SECONDS = 10.0
ADDRESS = "127.0.0.1"  # of every machine


class FakeCloud:
    """A fake cloud whose state is in a folder of this machine.

    Args:
        folder: the server's folder, with its address and token.
        visibility_seconds: longest time until the effect of a request is visible.
    """

    name = "fake"

    def __init__(self, folder: Path, visibility_seconds: float = 0.0) -> None:
        self.folder = folder
        self.capabilities = Capabilities(visibility_seconds=visibility_seconds)

    def offers(self) -> Sequence[Offer]:
        return [Offer(**offer) for offer in self.call("GET", "/offers")["offers"]]

    def find(self, key: str) -> Sighting:
        try:
            return Sighting.of(next((machine for machine in self.list(key) if machine.key == key), None))
        except PeriluneError as error:
            return Sighting(Presence.UNKNOWN, why=str(error))

    def create(self, key: str, request: MachineRequest) -> RentedMachine:
        return _machine(self.call("PUT", f"/machines/{quote(key)}", asdict(request)))

    def list(self, tag: str) -> Sequence[RentedMachine]:
        listed = self.call("GET", f"/machines?prefix={quote(tag)}")["machines"]
        return [_machine(fields) for fields in listed]

    def terminate(self, key: str) -> None:
        self.call("DELETE", f"/machines/{quote(key)}")

    def host(self, machine: RentedMachine) -> Host:
        return FakeHost(self, machine.key)

    def inject(self, **fault: Any) -> None:
        """Inject a fault: fields of the server's POST /faults."""
        self.call("POST", "/faults", fault)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Make one HTTP call; returns the JSON of the answer.

        Raises:
            ProviderUnreachableError: no answer or a server error; the effect is unknown.
            NoCapacityError, ProviderRefusedError: the call had no effect.
        """
        where = f"fake cloud, {method} {path}"
        data = None if body is None else json.dumps(body)
        try:
            with self.connection() as connection:
                connection.request(method, path, data, self.headers())
                answer = connection.getresponse()
                status, document = answer.status, json.loads(answer.read() or b"{}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ProviderUnreachableError(
                f"no answer ({error or type(error).__name__})", where=where
            ) from None
        if status == 503 and "capacity" in document:
            raise NoCapacityError(document["error"], where=where)
        if 400 <= status < 500:
            raise ProviderRefusedError(str(document.get("error", status)), where=where)
        if status != 200:
            raise ProviderUnreachableError(f"status {status}", where=where)
        return document

    @contextmanager
    def connection(self) -> Iterator[http.client.HTTPConnection]:
        """Yield a new connection to the server; raises OSError if it does not listen."""
        port = int(json.loads((self.folder / "address.json").read_text())["port"])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CALL_SECONDS)
        try:
            yield connection
        finally:
            connection.close()

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {(self.folder / 'token').read_text()}"}


class FakeHost:
    """A machine of the fake cloud."""

    def __init__(self, cloud: FakeCloud, key: str) -> None:
        self.cloud, self.key = cloud, key
        self.name = f"fake:{key}"

    def run(
        self,
        command: Sequence[str],
        *,
        source: BinaryIO | None = None,
        sink: BinaryIO | None = None,
        timeout: float = 60.0,
    ) -> Answer:
        try:
            with self.cloud.connection() as connection:
                connection.connect()
                assert connection.sock is not None
                connection.sock.settimeout(CALL_SECONDS)
                return self._run(connection.sock, command, source, sink, timeout)
        except (OSError, ValueError) as error:
            raise self._unreachable(str(error) or type(error).__name__) from None

    def _run(
        self,
        wire: socket.socket,
        command: Sequence[str],
        source: BinaryIO | None,
        sink: BinaryIO | None,
        timeout: float,
    ) -> Answer:
        with close_after(wire, timeout) as late, wire.makefile("rb") as answers:
            try:
                self._ask(wire, answers, command)
                wire.settimeout(None)
                return run_conversation(wire, answers, source, sink)
            except BrokenConnectionError as error:
                why = f"no end within {timeout:g} s" if late.is_set() else str(error)
                raise self._unreachable(why) from None

    def _ask(self, wire: socket.socket, answers: BinaryIO, command: Sequence[str]) -> None:
        fields = {**self.cloud.headers(), "Host": "127.0.0.1", "X-Command": json.dumps(list(command))}
        lines = [f"POST /machines/{quote(self.key)}/exec HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        wire.sendall("\r\n".join([*lines, "", ""]).encode())
        status = answers.readline().split()
        if status[1:2] != [b"101"]:
            raise BrokenConnectionError("the machine does not answer")
        while answers.readline().strip():
            pass

    def _unreachable(self, why: str) -> HostUnreachableError:
        return HostUnreachableError(f"{self.name} cannot be reached: {why}")


def _machine(fields: dict[str, Any]) -> RentedMachine:
    status = MachineStatus(fields["status"])
    return RentedMachine(**{**fields, "status": status, "address": ADDRESS})
