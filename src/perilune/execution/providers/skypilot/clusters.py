"""SkyPilot's clusters as machines, and this process's memory of them.

SkyPilot forgets a cluster as soon as its machines are gone, without a reason. A process that saw it alive and
did not terminate it can infer the reason.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from perilune.execution.providers.protocol import MachineKey, MachineRequest, MachineStatus, RentedMachine
from perilune.execution.providers.skypilot.skypilot_settings import Kind

LOST_NODES = "nodes terminated"  # SkyPilot's message for a cluster that has lost some machines
MINUTE = 60.0


class Clusters:
    """The clusters of one provider."""

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self._kinds = kinds
        self._requests: dict[str, MachineRequest] = {}
        self._ssh: dict[str, str] = {}
        self._alive: dict[str, Sequence[RentedMachine]] = {}
        self._gone: dict[str, Sequence[RentedMachine]] = {}
        self._terminated: set[str] = set()

    def note_request(self, cluster: str, request: MachineRequest) -> None:
        """Remember that a cluster is about to be launched."""
        self._requests[cluster] = request

    def note_termination(self, cluster: str) -> None:
        """Remember that this process terminates a cluster, so that its end gets no inferred reason."""
        self._terminated.add(cluster)

    def ssh(self, cluster: str) -> str:
        return self._ssh.get(cluster, f"~/.sky/generated/ssh/{cluster}")

    def machines(self, prefix: str, clusters: Sequence[Mapping[str, Any]]) -> dict[str, RentedMachine]:
        """Return the machines by key: those that the bridge listed, and those that disappeared, as ended."""
        for cluster in clusters:
            name = cluster["cluster"]
            self._ssh[name] = cluster.get("ssh") or self.ssh(name)
            self._gone.pop(name, None)
        listed = {cluster["cluster"]: self._machines(cluster) for cluster in clusters}
        for name in [name for name in self._alive if name.startswith(prefix) and name not in listed]:
            left = self._alive.pop(name)
            if name not in self._terminated:
                self._gone[name] = [replace(item, status=MachineStatus.ENDED, unseen="") for item in left]
        for name, cluster in ((cluster["cluster"], cluster) for cluster in clusters):
            if cluster["status"] == "UP":
                self._alive[name] = [replace(item, reason=find_gone_reason(cluster)) for item in listed[name]]
        gone = {name: left for name, left in self._gone.items() if name.startswith(prefix)}
        return {machine.key: machine for machines in (listed | gone).values() for machine in machines}

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
                billed_seconds=launch_age(cluster),
                reason=reason,
                address=addresses[rank],
                unseen=cluster.get("unseen", ""),
            )
            for rank in range(nodes)
        ]


def status_of(cluster: Mapping[str, Any]) -> tuple[MachineStatus, str]:
    """Return the status of a cluster's machines, and why they are ending.

    If a cluster was up and is INIT again, its SkyPilot runtime does not answer. Perilune does not need the
    runtime; ssh shows whether the machine lives.
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
        case _:  # AUTOSTOPPING, which means termination: tasks set autodown
            return MachineStatus.ENDING, "lifetime"


def find_gone_reason(cluster: Mapping[str, Any]) -> str:
    """Return the reason to report if a cluster that is up now disappears without our termination."""
    minutes = cluster.get("minutes", -1)
    if minutes >= 0 and launch_age(cluster) >= (minutes - 1) * MINUTE:
        return "lifetime"
    return "preempted" if cluster.get("spot") else "host failure"


def launch_age(cluster: Mapping[str, Any]) -> float:
    return max(0.0, time.time() - float(cluster["launched"]))


def cluster_of(key: str) -> str:
    """Return the name of the cluster with the machine `key`, which is the key of its head node."""
    return key_of(key, 0)


def key_of(cluster: str, rank: int) -> str:
    key = MachineKey.parse(cluster)
    return cluster if key is None else str(replace(key, rank=rank))


def rank_of(key: str) -> int:
    """Return the rank of the machine `key` in its cluster; the head node is 0."""
    parsed = MachineKey.parse(key)
    return parsed.rank if parsed else 0
