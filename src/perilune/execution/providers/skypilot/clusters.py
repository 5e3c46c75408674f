"""What SkyPilot says of its clusters, as machines; and what this process remembers of them.

SkyPilot forgets a cluster as soon as its machines are gone, and never says why. Whoever saw it alive, and did
not end it, knows better.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from perilune.execution.providers.protocol import MachineKey, MachineRequest, MachineStatus, RentedMachine
from perilune.execution.providers.skypilot.skypilot_settings import Kind

LOST_NODES = "nodes terminated"  # SkyPilot's words for a cluster of which some machines are gone
MINUTE = 60.0


class Clusters:
    """Clusters of one provider.

    Args:
        kinds: of machines, as providers.yaml has them.
    """

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self._kinds = kinds
        self._requests: dict[str, MachineRequest] = {}
        self._ssh: dict[str, str] = {}
        self._alive: dict[str, Sequence[RentedMachine]] = {}
        self._gone: dict[str, Sequence[RentedMachine]] = {}
        self._dismissed: set[str] = set()

    def wanted(self, cluster: str, request: MachineRequest) -> None:
        """A cluster is about to be asked for."""
        self._requests[cluster] = request

    def dismissed(self, cluster: str) -> None:
        """We end a cluster ourselves: that it goes is no surprise."""
        self._dismissed.add(cluster)

    def ssh(self, cluster: str) -> str:
        """The file that tells ssh how to get to a cluster."""
        return self._ssh.get(cluster, f"~/.sky/generated/ssh/{cluster}")

    def machines(self, prefix: str, clusters: Sequence[Mapping[str, Any]]) -> dict[str, RentedMachine]:
        """Machines by key, from what the bridge listed; and those that have gone by themselves, as ended."""
        for cluster in clusters:
            name = cluster["cluster"]
            self._ssh[name] = cluster.get("ssh") or self.ssh(name)
            self._gone.pop(name, None)
        listed = {cluster["cluster"]: self._machines(cluster) for cluster in clusters}
        for name in [name for name in self._alive if name.startswith(prefix) and name not in listed]:
            left = self._alive.pop(name)
            if name not in self._dismissed:
                self._gone[name] = [replace(one, status=MachineStatus.ENDED, unseen="") for one in left]
        for name, cluster in ((one["cluster"], one) for one in clusters):
            if cluster["status"] == "UP":
                self._alive[name] = [replace(one, reason=why_gone(cluster)) for one in listed[name]]
        gone = {name: left for name, left in self._gone.items() if name.startswith(prefix)}
        return {one.key: one for machines in (listed | gone).values() for one in machines}

    def _machines(self, cluster: Mapping[str, Any]) -> Sequence[RentedMachine]:
        name, request = cluster["cluster"], self._requests.get(cluster["cluster"])
        status, reason = status_of(cluster)
        kind = cluster.get("kind") or (request.kind if request else "")
        price = self._kinds[kind].price if kind in self._kinds else None
        nodes = cluster.get("nodes") or (request.nodes if request else 1)
        addresses = [*cluster.get("addresses", ()), *[""] * nodes]
        return [
            RentedMachine(
                key=key_of(name, rank),
                id=name,
                kind=kind,
                price=price or cluster.get("price") or 0.0,
                status=status,
                billed_seconds=age(cluster),
                reason=reason,
                address=addresses[rank],
                unseen=cluster.get("unseen", ""),
            )
            for rank in range(nodes)
        ]


def status_of(cluster: Mapping[str, Any]) -> tuple[MachineStatus, str]:
    """The status of a cluster's machines, and why they are ending.

    The SkyPilot runtime of a cluster that was up and is INIT again does not answer; nothing of ours needs it,
    and whether the machine lives ssh will tell.
    """
    taken = "preempted" if cluster.get("spot") else "host failure"
    match cluster["status"]:
        case "UP":
            return MachineStatus.RUNNING, ""
        case "INIT" if cluster.get("ever_up") and not cluster["launching"]:
            lost = LOST_NODES in cluster["why"]
            return (MachineStatus.ENDING, taken) if lost else (MachineStatus.RUNNING, "")
        case "INIT" | "PENDING":
            return MachineStatus.PENDING, ""
        case "STOPPED":
            return MachineStatus.ENDING, taken
        case _:  # AUTOSTOPPING, which is its end: it is never told to stop only
            return MachineStatus.ENDING, "lifetime"


def why_gone(cluster: Mapping[str, Any]) -> str:
    """Why a cluster that is up now has gone, when it is no longer listed and we have not ended it."""
    minutes = cluster.get("minutes", -1)
    if minutes >= 0 and age(cluster) >= (minutes - 1) * MINUTE:
        return "lifetime"
    return "preempted" if cluster.get("spot") else "host failure"


def age(cluster: Mapping[str, Any]) -> float:
    """Seconds since a cluster was launched."""
    return max(0.0, time.time() - float(cluster["launched"]))


def cluster_of(key: str) -> str:
    """The name of the cluster that has the machine called `key`: the key of its head."""
    return key_of(key, 0)


def key_of(cluster: str, rank: int) -> str:
    """The key of one of a cluster's machines."""
    key = MachineKey.parse(cluster)
    return cluster if key is None else str(replace(key, rank=rank))


def rank_of(key: str) -> int:
    """Which of its cluster's machines is called so; the head is 0."""
    parsed = MachineKey.parse(key)
    return parsed.rank if parsed else 0
