"""The gateway to the machines on a Ray cluster, without a cluster."""

import importlib
import json
import socket
import threading
from pathlib import Path

import pytest

from perilune.bundle import machine
from perilune.bundle.remote import runner
from perilune.execution.hosts.protocol import HostRefusedError
from perilune.execution.providers.frames import Kind, encode_frame
from perilune.execution.providers.ray.cluster import folders
from perilune.execution.providers.ray.host import RayHost
from perilune.execution.providers.ray.jobs import build_package


def test_cluster_and_worker_use_the_same_variables() -> None:
    assert (folders.CORES, folders.HOLDER) == (machine.CORES, runner.HOLDER)


def test_gateway_outlives_a_connection_that_cannot_be_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    (tmp_path / "package.zip").write_bytes(build_package())
    monkeypatch.syspath_prepend(str(tmp_path / "package.zip"))
    gateway = importlib.import_module("perilune_ray.gateway")
    accept, refused, served = socket.socket.accept, threading.Event(), threading.Event()

    def fail_once(listener: socket.socket) -> object:
        if not refused.is_set():
            refused.set()
            raise OSError(24, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_once)
    monkeypatch.setattr(gateway, "PAUSE", 0.01)
    monkeypatch.setattr(gateway, "serve_connection", lambda wire, namespace: served.set())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    threading.Thread(target=gateway.serve, args=("127.0.0.1", port, "n"), daemon=True).start()
    assert refused.wait(10)
    socket.create_connection(("127.0.0.1", port), 10).close()
    assert served.wait(10)


@pytest.mark.parametrize("hello", [{"proof": "é"}, ["proof"]])
def test_service_that_is_no_gateway_is_refused(hello: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            wire, _ = listener.accept()
            with wire:
                wire.recv(1000)
                wire.sendall(encode_frame(Kind.HELLO, json.dumps(hello).encode()))

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(HostRefusedError, match="is not this machine's gateway"):
            RayHost(f"127.0.0.1:{listener.getsockname()[1]}", "machine", "0" * 64).run(["true"])
