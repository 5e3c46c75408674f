"""Provider `ray`: a Ray cluster, of which each job of ours holds the machines of one attempt.

A cluster whose head is restarted has forgotten its jobs, and all that they ran has ended then: a job that is
not listed is absent, and so are its machines.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perilune.errors import PeriluneError
from perilune.execution.hosts.protocol import Host, HostUnreachableError
from perilune.execution.processes import Presence
from perilune.execution.providers.protocol import (
    Capabilities,
    MachineKey,
    MachineRequest,
    MachineStatus,
    Offer,
    ProviderRefusedError,
    RentedMachine,
    Sighting,
    tag_of,
)
from perilune.execution.providers.ray.host import RayHost
from perilune.execution.providers.ray.jobs import PACKAGE, Job, Jobs
from perilune.execution.providers.ray.ray_settings import RaySettings

READY = "perilune-ready "  # begins the line in which a job tells of its machines
MOST = 4096  # machines of one attempt
REMEMBERED = 24 * 3600.0  # seconds for which Ray is to remember jobs of ours that have ended
NOT_FOUND = {126, 127}  # exit codes of a shell
REASONS = {"STOPPED": "terminated", "SUCCEEDED": "lifetime"}


@dataclass(frozen=True, slots=True)
class _Ready:
    """What a job has said of its machines: where each is, and what lets commands in.

    Attributes:
        started: of the job; after the head was restarted another may have its name.
    """

    started: float | None
    addresses: Sequence[str]
    token: str


class RayCluster:
    """The machines that a Ray cluster makes room for."""

    name = "ray"
    capabilities = Capabilities(
        ends_by_itself=True, announces=False, visibility_seconds=0.0, keeps_files=True
    )

    def __init__(self, settings: RaySettings) -> None:
        self.settings = settings
        self.jobs = Jobs(settings.dashboard, settings.token)
        self._ready: dict[str, _Ready] = {}

    def offers(self) -> Sequence[Offer]:
        """What is configured; whether there is room for it now, Ray tells by keeping a job waiting."""
        return [Offer(name, kind.price, None) for name, kind in self.settings.kinds.items()]

    def find(self, key: str) -> Sighting:
        """Look for one machine."""
        try:
            job = self.jobs.find(_job_of(key)[0])
            found = [] if job is None else [one for one in self._machines(job) if one.key == key]
        except PeriluneError as error:
            return Sighting(Presence.UNKNOWN, why=str(error))
        return Sighting(Presence.PRESENT, found[0]) if found else Sighting(Presence.ABSENT)

    def create(self, key: str, request: MachineRequest) -> RentedMachine:
        """Submit the job that holds the machines of all ranks, or find the one that is there."""
        name, rank = _job_of(key)
        if request.kind not in self.settings.kinds:
            known = ", ".join(self.settings.kinds)
            raise ProviderRefusedError(f"no machine of kind '{request.kind}'", remedy=f"one of {known}")
        job = self.jobs.find(name)
        if job is None:
            self._forget_old_jobs(name)
            try:
                self.jobs.submit(name, self._entrypoint(name, request), self._metadata(request))
            except PeriluneError:
                if self.jobs.find(name) is None:  # else another was quicker, or the answer was lost
                    raise
            job = Job(name, "PENDING", "", None, None, None, self._metadata(request))
        return self._machines(job)[rank]

    def list(self, tag: str) -> Sequence[RentedMachine]:
        """Every machine whose key begins with `tag`."""
        ours = (job for job in self.jobs.all() if MachineKey.parse(f"{job.name}-0") is not None)
        asked = (job for job in ours if job.name.startswith(tag) or tag.startswith(job.name))
        return [one for job in asked for one in self._machines(job) if one.key.startswith(tag)]

    def terminate(self, key: str) -> None:
        """End the machine called `key`, and with it those of all other ranks."""
        self.jobs.stop(_job_of(key)[0])

    def host(self, machine: RentedMachine) -> Host:
        """How commands are run on it.

        Raises:
            HostUnreachableError: its job has not said yet how.
        """
        name, _ = _job_of(machine.key)
        if name not in self._ready:
            self.find(machine.key)  # asks the job, and never raises
        ready = self._ready.get(name)
        if ready is None:
            raise HostUnreachableError("it is not ready", where=f"ray:{machine.key}")
        return RayHost(self.settings.gateway, machine.key, ready.token)

    def _machines(self, job: Job) -> Sequence[RentedMachine]:
        """One a rank."""
        ready = self._told(job) if job.status == "RUNNING" else None
        status = MachineStatus.PENDING if job.status in {"PENDING", "RUNNING"} else MachineStatus.ENDED
        began, ended = job.started, job.ended
        addresses = dict(enumerate(ready.addresses)) if ready is not None else {}
        try:
            nodes = min(int(job.metadata.get("perilune.nodes", 1)), MOST)
            price = float(job.metadata.get("perilune.price", 0.0))
        except ValueError:  # not as we wrote it
            nodes, price = 1, 0.0
        return [
            RentedMachine(
                key=f"{job.name}-{rank}",
                id=job.name,
                kind=job.metadata.get("perilune.kind", ""),
                price=price,
                status=MachineStatus.RUNNING if ready is not None else status,
                billed_seconds=0.0 if began is None else max(0.0, (ended or time.time()) - began),
                reason=self._reason(job) if status is MachineStatus.ENDED else "",
                address=addresses.get(rank, ""),
            )
            for rank in range(nodes)
        ]

    def _told(self, job: Job) -> _Ready | None:
        """What the job has said of its machines, which it says once."""
        known = self._ready.get(job.name)
        if known is not None and known.started == job.started:
            return known
        lines = self.jobs.log(job.name).splitlines()
        said = [line.removeprefix(READY) for line in lines if line.startswith(READY)]
        with contextlib.suppress(ValueError, KeyError, TypeError):
            told = json.loads(said[0]) if said else {}
            addresses = [str(one) for one in told["addresses"]]
            self._ready[job.name] = _Ready(job.started, addresses, str(told["token"]))
            return self._ready[job.name]
        return None

    def _reason(self, job: Job) -> str:
        """Why a job has ended, as a provider says it."""
        said = (job.message.strip().splitlines() or [""])[-1].removeprefix("host failure: ")
        if job.exit_code in NOT_FOUND:
            said = f"there is no {self.settings.python} on the head node"
        return REASONS.get(job.status) or f"host failure: {said[:200]}"

    def _entrypoint(self, name: str, request: MachineRequest) -> str:
        """The command of a job; Ray gives it to a shell, so every argument is quoted."""
        options = {
            "--name": name,
            "--nodes": str(request.nodes),
            "--resources": json.dumps(self.settings.kinds[request.kind].resources()),
            "--strategy": self.settings.strategy if request.nodes > 1 else "PACK",
            "--workspace": self.settings.workspace,
            "--namespace": self.settings.namespace,
            "--listen": self.settings.listen,
            "--lifetime": str(request.lifetime_seconds),
        }
        listed = [part for option in options.items() for part in option]
        return shlex.join([self.settings.python, "-m", f"{PACKAGE}.holder", *listed])

    def _metadata(self, request: MachineRequest) -> Mapping[str, str]:
        price = self.settings.kinds[request.kind].price
        told = {"kind": request.kind, "nodes": request.nodes, "price": price}
        return {f"perilune.{name}": str(value) for name, value in told.items()}

    def _forget_old_jobs(self, name: str) -> None:
        """So that Ray's list does not grow for ever."""
        key = MachineKey.parse(f"{name}-0")
        if key is not None:
            for job in self.jobs.all():
                old = job.ended is not None and time.time() - job.ended > REMEMBERED
                if old and job.name.startswith(f"{tag_of(key.cluster)}-"):
                    self.jobs.forget(job.name)


def _job_of(key: str) -> tuple[str, int]:
    """Name of the job that holds a machine, and the machine's rank.

    Raises:
        ProviderRefusedError: it is no key of ours.
    """
    if MachineKey.parse(key) is None:
        raise ProviderRefusedError(f"'{key}' is no name of a machine")
    name, _, rank = key.rpartition("-")
    return name, int(rank)
