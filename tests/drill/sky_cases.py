"""A fake SkyPilot whose clouds are a file, and homes that rent from it."""

import fcntl
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from perilune.control.machines.leases import Lease, Rental
from perilune.execution.providers.skypilot.client import SkyPilot
from perilune.execution.providers.skypilot.skypilot_settings import SkyPilotSettings

PACKAGE = Path(__file__).parent / "fake_sky"
LEASE = Lease(max_lifetime=600.0, idle=300.0, max_cost=1.0, ready_within=300.0)
SPOT = Rental(provider="sky", kind="spot", lease=LEASE)
KINDS = {
    "spot": {"price": 0.4, "resources": {"infra": "aws", "accelerators": "A100:1", "use_spot": True}},
    "plain": {"price": 1.2, "resources": {"cpus": "4+", "memory": "16+"}},
    "wrong": {"price": 1.0, "resources": {"acelerators": "A100"}},
}


class FakeSky:
    """The state of the fake clouds, and an interpreter with the fake package.

    Args:
        way: lines of an ssh config for every machine.
    """

    def __init__(self, folder: Path, way: str = "  HostName 127.0.0.1\n  Port 1\n") -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        (folder / "way").write_text(way)
        fresh = {"clusters": {}, "requests": [], "weather": {}, "made": [], "tasks": []}
        (folder / "state.json").write_text(json.dumps(fresh))
        self.python = folder / "python"
        variables = f"FAKE_SKY={folder} HOME={self.home} PYTHONPATH={PACKAGE}"
        self.python.write_text(f'#!/bin/sh\nexec env {variables} {sys.executable} "$@"\n')
        self.python.chmod(0o755)

    @contextmanager
    def state(self) -> Iterator[Any]:
        """The state, which the block may change."""
        with (self.folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = json.loads((self.folder / "state.json").read_text())
            yield known
            (self.folder / "state.json").write_text(json.dumps(known))

    def weather(self, **weather: Any) -> None:
        """Script failures: `before_down=3`, `launch=["capacity"]`, `launch_seconds=1.0`, ..."""
        names = {"launch": "sky.launch", "down": "sky.down"}
        with self.state() as known:
            for name, value in weather.items():
                when, _, call = name.partition("_")
                scripted = f"{when} {call}" if when in {"before", "after", "death"} else name
                known["weather"][names.get(scripted, scripted)] = value

    def change(self, cluster: str, **fields: Any) -> None:
        """Change a cluster in its cloud."""
        with self.state() as known:
            known["clusters"][cluster] |= fields

    def alive(self) -> list[str]:
        """Clusters that exist and cost money."""
        self.look()
        with self.state() as known:
            return [name for name, cluster in known["clusters"].items() if cluster["alive"]]

    def made(self) -> list[str]:
        """All clusters ever created, one entry per creation."""
        with self.state() as known:
            return list(known["made"])

    def tasks(self) -> list[Any]:
        """All launched tasks."""
        with self.state() as known:
            return list(known["tasks"])

    def look(self) -> None:
        """Complete all due requests."""
        subprocess.run([str(self.python), "-c", "import sky; sky.api_status()"], check=True)

    def settings(self, **changes: Any) -> dict[str, Any]:
        """The settings in providers.yaml."""
        quick = {"look_seconds": 0, "visibility_seconds": 0}
        return {"type": "skypilot", "python": str(self.python), "kinds": KINDS, **quick, **changes}

    def provider(self, folder: Path, **changes: Any) -> SkyPilot:
        """A provider that uses this fake SkyPilot."""
        return SkyPilot(SkyPilotSettings.model_validate(self.settings(**changes)), folder)

    def rent_to(self, home: Path, **changes: Any) -> None:
        """Let the home at `home` rent from this fake SkyPilot."""
        home.mkdir(parents=True, exist_ok=True)
        document = {"daily_cap": 100.0, "providers": {"sky": self.settings(**changes)}}
        (home / "providers.yaml").write_text(yaml.safe_dump(document))


def stale() -> int:
    """The time of an outdated cluster status."""
    return int(time.time()) - 60
