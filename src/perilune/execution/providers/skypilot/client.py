"""Provider `skypilot`: SkyPilot clusters as rented machines, one cluster per attempt."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perilune.errors import PeriluneError
from perilune.execution.hosts.protocol import Host
from perilune.execution.hosts.ssh import SshHost, SshSettings
from perilune.execution.processes import Presence
from perilune.execution.providers.protocol import (
    Capabilities,
    MachineRequest,
    MachineStatus,
    Offer,
    ProviderRefusedError,
    RentedMachine,
    Sighting,
)
from perilune.execution.providers.skypilot.clusters import Clusters, cluster_of, rank_of
from perilune.execution.providers.skypilot.connection import Bridge
from perilune.execution.providers.skypilot.skypilot_settings import SkyPilotSettings

# Seconds to wait for an immediate failure of a launch; a later one is reported at the next request.
CREATE_TIMEOUT_S = 5.0


class SkyPilot:
    """Machines of the clouds that SkyPilot supports.

    A cluster has the key of its head node as its name. SkyPilot keeps a record of its clusters (~/.sky), so
    they can be found without Perilune's record, unless SkyPilot's is lost too.

    Args:
        folder: for files with host keys.
    """

    name = "skypilot"

    def __init__(self, settings: SkyPilotSettings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.capabilities = Capabilities(visibility_seconds=settings.visibility_seconds)
        self._bridge = Bridge(settings.python)
        self._clusters = Clusters(settings.kinds)
        self._looks: dict[str, CachedLook] = {}
        self._looking = threading.Lock()

    def __enter__(self) -> SkyPilot:
        return self

    def __exit__(self, *_: object) -> None:
        self._bridge.close()

    def offers(self) -> Sequence[Offer]:
        """Return the kinds in providers.yaml. Raises ProviderRefusedError for a kind without a price."""
        kinds = self.settings.kinds.items()
        return [Offer(name, self._price(name), None, kind.preemptible) for name, kind in kinds]

    def problem(self, kind: str) -> str:
        """Return the problem with a kind, as far as it can be checked without renting; or ""."""
        if kind not in self.settings.kinds:
            return f"no kind '{kind}'; there is {', '.join(self.settings.kinds)}"
        return str(self._bridge.ask("check", task=self._task(kind, 1, minutes=60)).get("problem", ""))

    def find(self, key: str) -> Sighting:
        """Implement `Provider.find`; asks the clouds now."""
        try:
            return Sighting.of(self._look(cluster_of(key)).get(key))
        except PeriluneError as error:
            return Sighting(Presence.UNKNOWN, why=str(error))

    def create(self, key: str, request: MachineRequest) -> RentedMachine:
        """Launch the cluster of this key, without waiting the minutes that it takes."""
        if request.kind not in self.settings.kinds:
            known = ", ".join(self.settings.kinds)
            raise ProviderRefusedError(
                f"no kind '{request.kind}'",
                where="providers.yaml",
                remedy=f"one of {known}",
            )
        cluster = cluster_of(key)
        minutes = max(1, int(request.lifetime_seconds // 60))
        price = self._price(request.kind)
        task = self._task(request.kind, request.nodes, minutes=minutes, price=price)
        self._clusters.note_request(cluster, request)
        self._do("create", cluster=cluster, task=task, patience=CREATE_TIMEOUT_S)
        machine = self._look(cluster).get(key)
        if machine is not None:
            return machine
        return RentedMachine(key, cluster, request.kind, price, MachineStatus.PENDING, 0.0)

    def list(self, tag: str) -> Sequence[RentedMachine]:
        """Return every machine whose key begins with `tag`, from a look that is at most `look_seconds` old.

        An older look is used for the same time again, while a new one is in progress.
        """
        look = self._looks.setdefault(tag, CachedLook(lambda: self._look(tag)))
        if look.age > 2 * self.settings.look_seconds:
            look.take()
        elif look.age > self.settings.look_seconds:
            look.begin()
        return list(look.machines.values())

    def terminate(self, key: str) -> None:
        """Take down the cluster of this key, with all its machines."""
        cluster = cluster_of(key)
        self._clusters.note_termination(cluster)
        self._do("end", cluster=cluster)

    def host(self, machine: RentedMachine) -> Host:
        """Implement `Provider.host` with SkyPilot's ssh configuration. The host key is learned at once."""
        cluster, rank = cluster_of(machine.key), rank_of(machine.key)
        name = f"{cluster}-worker{rank}" if rank else cluster
        settings = SshSettings(host=name, config=self._clusters.ssh(cluster))
        return SshHost(settings, self.folder, learn=True)

    def _price(self, kind: str) -> float:
        price = self.settings.kinds[kind].price
        if price is None:
            price = self._bridge.ask("price", task=self._task(kind, 1))
        if price is None:
            raise ProviderRefusedError(
                f"SkyPilot's catalog has no price for the kind '{kind}'",
                where=f"providers.yaml, kinds.{kind}.price",
                remedy="set the highest price per hour that a machine of this kind may cost",
            )
        return price

    def _task(
        self, kind: str, nodes: int, *, minutes: int | None = None, price: float | None = None
    ) -> dict[str, Any]:
        resources = dict(self.settings.kinds[kind].resources)
        return {"kind": kind, "resources": resources, "nodes": nodes, "minutes": minutes, "price": price}

    def _do(self, call: str, **arguments: Any) -> None:
        try:
            self._bridge.ask(call, **arguments)
        finally:
            self._looks.clear()  # outdated now

    def _look(self, prefix: str) -> Mapping[str, RentedMachine]:
        """Ask the clouds. A stopped cluster is useless but billed, so it is taken down."""
        with self._looking:
            clusters = self._bridge.ask("look", prefix=prefix)
            for cluster in clusters:
                if cluster["status"] == "STOPPED":
                    self._bridge.ask("end", cluster=cluster["cluster"])
            return self._clusters.machines(prefix, clusters)


class CachedLook:
    """Machines at the time of the last look.

    Args:
        see: takes a look; raises PeriluneError if that fails.
    """

    def __init__(self, see: Callable[[], Mapping[str, RentedMachine]]) -> None:
        self.machines: Mapping[str, RentedMachine] = {}
        self._see, self._at = see, -float("inf")
        self._taking = threading.Lock()

    @property
    def age(self) -> float:
        """Seconds since the look began."""
        return time.monotonic() - self._at

    def take(self) -> None:
        """Take a look and wait for it."""
        with self._taking:
            began = time.monotonic()
            self.machines, self._at = self._see(), began

    def begin(self) -> None:
        """Take a look in the background, unless one is in progress. Errors surface in the next `take`."""
        if not self._taking.locked():
            threading.Thread(target=self._try, daemon=True).start()

    def _try(self) -> None:
        with contextlib.suppress(PeriluneError):
            self.take()
