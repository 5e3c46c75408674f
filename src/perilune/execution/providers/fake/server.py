"""The fake cloud: an HTTP server on the loopback interface, in a process of its own, with a token.

It may be killed and restarted on the same folder; machines and their commands continue meanwhile.

| call | effect |
|---|---|
| GET /offers | kinds, prices, capacity |
| GET /machines?prefix=P | visible machines whose key has this prefix |
| PUT /machines/KEY | create or find a machine |
| DELETE /machines/KEY | end a machine |
| POST /machines/KEY/exec | run a command on a machine, in frames |
| GET /faults, /bill | injected faults; cost of all machines |
| POST /faults | script a fault, or inject one now |
"""

import argparse
import contextlib
import hmac
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from perilune.errors import RequestError
from perilune.execution.processes import die_with_parent
from perilune.execution.providers.fake.execute import execute
from perilune.execution.providers.fake.inventory import PREEMPTIBLE, PRICES, TICK, FullError, Inventory
from perilune.execution.providers.fake.machines import now
from perilune.execution.providers.fake.weather import Fault, FaultInjector, Weather
from perilune.files import write_json

ADDRESS, TOKEN = "address.json", "token"
MAX_REQUEST_BYTES = 1 << 20
CAPACITY = 100


class Cloud:
    """The state and behavior behind the HTTP server."""

    def __init__(self, folder: Path, weather: Weather, capacity: int = CAPACITY) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.token = folder, _token(folder)
        self.faults = FaultInjector(weather, folder / "faults.jsonl")
        limits = dict.fromkeys(PRICES, capacity)
        self.inventory = Inventory(folder / "machines", self.faults, limits, self.cut)
        self.streams: dict[str, set[socket.socket]] = defaultdict(set)

    def cut(self, machine_id: str) -> None:
        """Break every connection to a machine."""
        for stream in list(self.streams[machine_id]):
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def listing(self, prefix: str) -> dict[str, Any]:
        return {"machines": [self.inventory.document(machine) for machine in self.inventory.shown(prefix)]}

    def create(self, key: str, body: dict[str, Any], late: float) -> dict[str, Any]:
        machine = self.inventory.create(key, str(body["kind"]), body.get("lifetime_seconds"), late=late)
        return self.inventory.document(machine)

    def terminate(self, key: str) -> dict[str, Any]:
        """End existing machines with this key; a machine that is created later is not affected."""
        for machine in self.inventory.all():
            if machine.record.key == key:
                self.inventory.end(machine, "terminated")
        return {}

    def offers(self) -> list[dict[str, Any]]:
        return [
            {
                "kind": kind,
                "price": price,
                "capacity": self.inventory.room(kind),
                "preemptible": kind in PREEMPTIBLE,
            }
            for kind, price in PRICES.items()
        ]

    def bill(self) -> dict[str, Any]:
        """Return the cost of every machine, by key."""
        moment, machines = now(), [machine.record for machine in self.inventory.all()]
        costs = {item.key: item.price * item.billed_seconds(moment) / 3600.0 for item in machines}
        alive = [machine.key for machine in machines if machine.ended is None]
        return {"costs": costs, "total": sum(costs.values()), "alive": alive}

    def inject(self, body: dict[str, Any]) -> dict[str, Any]:
        """Script a fault of calls ("call", "fault", "times"), or inject one into the machine "key" now."""
        if "call" in body:
            self.faults.script(str(body["call"]), Fault(body["fault"]), int(body.get("times", 1)))
            return {}
        for machine in self.inventory.all():
            if machine.record.key == body["key"]:
                match Fault(body["fault"]):
                    case Fault.PREEMPTED:
                        self.inventory.preempt(machine, float(body.get("seconds", 0.0)))
                    case Fault.HOST_DEATH:
                        self.inventory.host_death(machine)
                    case Fault.LINK_CUT:
                        self.inventory.cut(machine, float(body["seconds"]))
        return {}

    def live(self) -> None:
        """Apply events forever."""
        while True:
            time.sleep(TICK)
            with contextlib.suppress(OSError):
                self.inventory.tick()


class Handler(BaseHTTPRequestHandler):
    """One connection to the cloud."""

    protocol_version = "HTTP/1.1"
    cloud: Cloud
    timeout = 60

    def log_message(self, *_: Any) -> None:
        """Do not log calls; faults are recorded in faults.jsonl."""

    def date_time_string(self, timestamp: float | None = None) -> str:
        """Return the time of the cloud's clock, which may be wrong."""
        return super().date_time_string((timestamp or time.time()) + self.cloud.faults.weather.clock_skew)

    def do_GET(self) -> None:
        """Answer a call of any method."""
        parts = urlsplit(self.path)
        segments = [unquote(part) for part in parts.path.split("/") if part]
        if not hmac.compare_digest(self.headers.get("Authorization", ""), f"Bearer {self.cloud.token}"):
            self._answer(401, {"error": "the token is missing or wrong"})
            return
        try:
            match (self.command, *segments):
                case ("POST", "machines", key, "exec"):
                    self._execute(key)
                case ("GET", "faults"):
                    self._answer(200, {"injected": self.cloud.faults.injected})
                case ("POST", "faults"):
                    self._answer(200, self.cloud.inject(self._body()))
                case ("GET", "bill"):
                    self._answer(200, self.cloud.bill())
                case ("GET", "offers"):
                    self._perform("offers", "", lambda late: {"offers": self.cloud.offers()})
                case ("GET", "machines"):
                    prefix = parse_qs(parts.query).get("prefix", [""])[0]
                    self._perform("list", prefix, lambda late: self.cloud.listing(prefix))
                case ("PUT", "machines", key):
                    body = self._body()
                    self._perform("create", key, lambda late: self.cloud.create(key, body, late))
                case ("DELETE", "machines", key):
                    self._perform("terminate", key, lambda late: self.cloud.terminate(key))
                case _:
                    self._answer(404, {"error": f"there is no {parts.path}"})
        except FullError as error:
            self._answer(503, {"error": str(error), "capacity": 0})
        except (RequestError, KeyError, ValueError) as error:
            self._answer(400, {"error": str(error)})

    do_PUT = do_DELETE = do_POST = do_GET  # noqa: N815 - the base class gives the names

    def _perform(self, call: str, key: str, do: Callable[[float], dict[str, Any]]) -> None:
        """Perform a call and answer, with the fault that the weather injects into the call, if any."""
        faults = self.cloud.faults
        time.sleep(faults.seconds(faults.weather.latency))
        match faults.fault_for(call, key):
            case None:
                self._answer(200, do(0.0))
            case Fault.ERROR_BEFORE:
                self._answer(500, {"error": "internal error"})
            case Fault.LATE_EFFECT:
                do(faults.weather.late_seconds)
                self._answer(500, {"error": "internal error"})
            case Fault.ERROR_AFTER:
                do(0.0)
                self._answer(500, {"error": "internal error"})
            case _:
                do(0.0)
                self.close_connection = True  # without an answer

    def _execute(self, key: str) -> None:
        command = json.loads(self.headers.get("X-Command", "[]"))
        same_key = (item for item in self.cloud.inventory.shown(key) if item.record.key == key)
        machines = [machine for machine in same_key if machine.record.alive(now())]
        if not machines or machines[0].record.box is None or now() < machines[0].record.ready:
            self._answer(404, {"error": f"no machine {key} answers"})
            return
        machine = machines[0]
        self.close_connection = True
        if now() < machine.record.cut_until:
            return
        streams = self.cloud.streams[machine.record.id]
        streams.add(self.connection)
        try:
            execute(self.connection, self.rfile, machine, command)
        finally:
            streams.discard(self.connection)

    def _body(self) -> dict[str, Any]:
        length = int(self.headers.get("Content-Length", "0"))
        if length > MAX_REQUEST_BYTES:
            raise RequestError("the request is too long")
        body = json.loads(self.rfile.read(length) or b"{}")
        if not isinstance(body, dict):
            raise RequestError("not a JSON object")
        return body

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    """Answers each connection in its own thread, and ignores broken connections."""

    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connection errors, which the client notices."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def serve(folder: Path, weather: Weather, capacity: int = CAPACITY) -> None:
    """Serve the cloud in `folder` until killed, at its previous address if there is one."""
    cloud = Cloud(folder, weather, capacity)
    address = folder / ADDRESS
    port = json.loads(address.read_text())["port"] if address.exists() else 0
    handler = type("CloudHandler", (Handler,), {"cloud": cloud})
    with Server(("127.0.0.1", port), handler) as server:
        threading.Thread(target=cloud.live, name="weather", daemon=True).start()
        write_json(address, {"port": server.server_port, "pid": os.getpid()})
        server.serve_forever()


def _token(folder: Path) -> str:
    path = folder / TOKEN
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(24))
    return path.read_text()


def main() -> None:
    """`python -m perilune.execution.providers.fake.server FOLDER [--weather JSON]`."""
    parser = argparse.ArgumentParser(prog="fake cloud")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weather", type=json.loads, default={}, help="fields of Weather, as JSON")
    parser.add_argument("--capacity", type=int, default=CAPACITY, help="machines of a kind at once")
    parser.add_argument("--tied", action="store_true", help="end when the process that started it ends")
    given = parser.parse_args()
    if given.tied:
        die_with_parent(os.getppid())
    serve(given.folder.absolute(), Weather(**given.weather), given.capacity)


if __name__ == "__main__":
    main()
