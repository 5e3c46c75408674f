"""A real Ray cluster on this machine: own ports, folder and token; the nodes have loopback addresses."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from drill_cases import wait_for

from perilune.errors import PeriluneError
from perilune.execution.processes import kill_all
from perilune.execution.providers.ray.client import RayCluster
from perilune.execution.providers.ray.ray_settings import RaySettings

TOKEN = "PERILUNE_TEST_RAY_TOKEN"  # name of our secret with the cluster's token
MARK = "PERILUNE_TEST_RAY"  # environment variable of all processes of a cluster
MEMORY = 80_000_000  # bytes of each node's object store
HEAD, SECOND = "127.0.0.2", "127.0.0.3"


class LocalRay:
    """A head node, and a second node with the custom resource `second`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.id = folder, secrets.token_hex(8)
        self.port, self.dashboard, self.client, self.gateway = free_ports(4)
        self.token = secrets.token_hex(32)
        self._sessions: dict[str, list[int]] = {}
        (folder / "token").write_text(self.token)

    def settings(self, **changes: Any) -> RaySettings:
        """The settings in providers.yaml."""
        values = {
            "type": "ray",
            "dashboard": f"http://127.0.0.1:{self.dashboard}",
            "gateway": f"127.0.0.1:{self.gateway}",
            "listen": f"127.0.0.1:{self.gateway}",
            "token": TOKEN,
            "python": sys.executable,
            "workspace": str(self.folder / "its machines"),
            "kinds": {
                "small": {"cpus": 1, "price": 0.4},
                "elsewhere": {"cpus": 1, "custom": {"second": 1}},
                "huge": {"gpus": 1000},
            },
        }
        return RaySettings.model_validate({**values, **changes})

    def provider(self, **changes: Any) -> RayCluster:
        """The provider for this cluster."""
        return RayCluster(self.settings(**changes))

    def start_head(self) -> None:
        """Start the head node."""
        ports = {"port": self.port, "dashboard-port": self.dashboard, "ray-client-server-port": self.client}
        self._start(HEAD, "--head", "--dashboard-host=127.0.0.1", *(f"--{n}={p}" for n, p in ports.items()))

    def start_second(self) -> None:
        """Start the other node."""
        self._start(SECOND, f"--address={HEAD}:{self.port}", '--resources={"second": 1}')

    def answers(self) -> bool:
        """Whether the dashboard answers."""
        try:
            self.provider().jobs.list_jobs()
        except PeriluneError:
            return False
        return True

    def kill(self, node: str) -> None:
        """Kill Ray's processes on a node but not our own processes there, which must end by themselves."""
        for process in self._processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                if any("/ray/" in part or part.startswith("ray::") for part in process.cmdline()[:3]):
                    process.kill()

    def stop(self) -> None:
        """End all processes that ever ran on the cluster."""
        assert kill_all(lambda: [*self._processes(HEAD), *self._processes(SECOND)], grace=0.0)

    def _processes(self, node: str) -> list[psutil.Process]:
        """Descendants of a node, by mark or by session: some of Ray's processes clear the mark."""
        found, mark = [], f"{MARK}={self.id}-{node}".encode()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                ours = os.getsid(process.pid) in self._sessions.get(node, ())
                if ours or mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    found.append(process)
        return found

    def _start(self, node: str, *options: str) -> None:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PERILUNE_"))
        }
        environment |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "RAY_USAGE_STATS_ENABLED": "0",
            MARK: f"{self.id}-{node}",
        }
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *options, f"--node-ip-address={node}"),
            *("--num-cpus=4", "--num-gpus=0", f"--object-store-memory={MEMORY}"),
            *("--include-log-monitor=false", f"--temp-dir={self.folder}"),
            f"--dashboard-agent-listen-port={free_ports(1)[0]}",  # nodes must not share a port
        ]
        log = self.folder / f"{node}.log"
        with log.open("w") as output:
            starter = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._sessions.setdefault(node, []).append(starter.pid)
        assert starter.wait(240) == 0, log.read_text()


@contextmanager
def local_ray() -> Iterator[LocalRay]:
    """A cluster of two nodes, removed completely after the block."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short, because it contains Unix sockets
    cluster = LocalRay(folder)
    os.environ[TOKEN] = cluster.token
    try:
        cluster.start_head()
        cluster.start_second()
        wait_for(cluster.answers, "Ray's dashboard")
        yield cluster
    finally:
        cluster.stop()
        del os.environ[TOKEN]
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Unused loopback ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
