"""The gateway to the machines on a Ray cluster, without a cluster."""

import importlib
import socket
import threading
from pathlib import Path

import pytest

from perilune.execution.providers.ray.jobs import build_package


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
