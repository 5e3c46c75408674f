"""Provider `ray`: each job on a Ray cluster holds the machines of one attempt.

A restarted head node has forgotten its jobs, and everything they ran has ended. So a job that is not listed
is absent, and so are its machines.
"""

import contextlib
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perilune.errors import PeriluneError
from perilune.execution.hosts.protocol import Host, HostUnreachableError
from perilune.execution.processes import Presence
from perilune.execution.providers.frames import READY_PREFIX
from perilune.execution.providers.protocol import (
    Capabilities,
    MachineKey,
    MachineRequest,
    MachineStatus,
    Offer,
    ProviderRefusedError,
    RentedMachine,
    Sighting,
    cluster_tag,
)
from perilune.execution.providers.ray.host import RayHost
from perilune.execution.providers.ray.jobs import PACKAGE, Job, Jobs
from perilune.execution.providers.ray.ray_settings import RaySettings

MAX_MACHINES = 4096  # machines of one attempt
JOB_RETENTION_S = 24 * 3600.0  # seconds for which Ray keeps ended jobs of Perilune
NOT_FOUND = {126, 127}  # exit codes of a shell
REASONS = {"STOPPED": "terminated", "SUCCEEDED": "lifetime"}


@dataclass(frozen=True, slots=True)
class _ReadyJob:
    """The addresses of a job's machines, and the token for commands on them.

    Attributes:
        started: start of the job; after a restart of the head, another job may have its name.
    """

    started: float | None
    addresses: Sequence[str]
    token: str


class RayCluster:
    """The machines on a Ray cluster."""

    name = "ray"
    capabilities = Capabilities(visibility_seconds=0.0, keeps_files=True)

    def __init__(self, settings: RaySettings) -> None:
        self.settings = settings
        self.jobs = Jobs(settings.dashboard, settings.token)
        self._ready: dict[str, _ReadyJob] = {}

    def offers(self) -> Sequence[Offer]:
        """Return the configured kinds. If the cluster is full, Ray keeps a job pending."""
        return [Offer(name, kind.price, None) for name, kind in self.settings.kinds.items()]

    def find(self, key: str) -> Sighting:
        try:
            job = self.jobs.find(_parse_key(key)[0])
            machines = () if job is None else self._machines(job)
            return Sighting.of(next((machine for machine in machines if machine.key == key), None))
        except PeriluneError as error:
            return Sighting(Presence.UNKNOWN, why=str(error))

    def create(self, key: str, request: MachineRequest) -> RentedMachine:
        """Submit the job that holds the machines of all ranks, or find the existing one."""
        name, rank = _parse_key(key)
        if request.kind not in self.settings.kinds:
            known = ", ".join(self.settings.kinds)
            raise ProviderRefusedError(
                f"no machine of kind '{request.kind}'",
                where="providers.yaml",
                remedy=f"one of {known}",
            )
        job = self.jobs.find(name)
        if job is None:
            self._forget_old_jobs(name)
            try:
                self.jobs.submit(name, self._entrypoint(name, request), self._metadata(request))
            except PeriluneError:
                if self.jobs.find(name) is None:  # otherwise only the answer was lost
                    raise
            job = Job(name, "PENDING", "", None, None, None, self._metadata(request))
        return self._machines(job)[rank]

    def list(self, tag: str) -> Sequence[RentedMachine]:
        ours = (job for job in self.jobs.list_jobs() if MachineKey.parse(f"{job.name}-0") is not None)
        asked = (job for job in ours if job.name.startswith(tag) or tag.startswith(job.name))
        return [machine for job in asked for machine in self._machines(job) if machine.key.startswith(tag)]

    def terminate(self, key: str) -> None:
        """Terminate the machine with this key, together with those of all other ranks."""
        self.jobs.stop(_parse_key(key)[0])

    def host(self, machine: RentedMachine) -> Host:
        """Implement `Provider.host`.

        Raises:
            HostUnreachableError: its job has not described its machines yet.
        """
        name, _ = _parse_key(machine.key)
        if name not in self._ready:
            self.find(machine.key)  # reads the job's log, and never raises
        ready = self._ready.get(name)
        if ready is None:
            raise HostUnreachableError("it is not ready", where=f"ray:{machine.key}")
        return RayHost(self.settings.gateway, machine.key, ready.token)

    def _machines(self, job: Job) -> Sequence[RentedMachine]:
        """Return the machines of a job, one per rank."""
        ready = self._readiness(job) if job.status == "RUNNING" else None
        status = MachineStatus.PENDING if job.status in {"PENDING", "RUNNING"} else MachineStatus.ENDED
        began, ended = job.started, job.ended
        addresses = dict(enumerate(ready.addresses)) if ready is not None else {}
        try:
            nodes = min(int(job.metadata.get("perilune.nodes", 1)), MAX_MACHINES)
            price = float(job.metadata.get("perilune.price", 0.0))
        except ValueError:  # not the metadata that `_metadata` wrote
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

    def _readiness(self, job: Job) -> _ReadyJob | None:
        """Return the machines that the job described in its log, which it does once."""
        known = self._ready.get(job.name)
        if known is not None and known.started == job.started:
            return known
        lines = self.jobs.log(job.name).splitlines()
        ready = [line.removeprefix(READY_PREFIX) for line in lines if line.startswith(READY_PREFIX)]
        with contextlib.suppress(ValueError, KeyError, TypeError):
            document = json.loads(ready[0]) if ready else {}
            addresses = [str(address) for address in document["addresses"]]
            self._ready[job.name] = _ReadyJob(job.started, addresses, str(document["token"]))
            return self._ready[job.name]
        return None

    def _reason(self, job: Job) -> str:
        """Return why a job has ended, in the terms of `RentedMachine.reason`."""
        message = (job.message.strip().splitlines() or [""])[-1].removeprefix("host failure: ")
        if job.exit_code in NOT_FOUND:
            message = f"there is no {self.settings.python} on the head node"
        return REASONS.get(job.status) or f"host failure: {message[:200]}"

    def _entrypoint(self, name: str, request: MachineRequest) -> str:
        """Return the command of a job, quoted because Ray passes it to a shell."""
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
        fields = {"kind": request.kind, "nodes": request.nodes, "price": price}
        return {f"perilune.{name}": str(value) for name, value in fields.items()}

    def _forget_old_jobs(self, name: str) -> None:
        """Delete old jobs, so that Ray's list does not grow forever."""
        key = MachineKey.parse(f"{name}-0")
        if key is not None:
            for job in self.jobs.list_jobs():
                old = job.ended is not None and time.time() - job.ended > JOB_RETENTION_S
                if old and job.name.startswith(f"{cluster_tag(key.cluster)}-"):
                    self.jobs.forget(job.name)


def _parse_key(key: str) -> tuple[str, int]:
    """Return the name of the job that holds a machine, and the machine's rank.

    Raises:
        ProviderRefusedError: the key is not one of Perilune's.
    """
    if MachineKey.parse(key) is None:
        raise ProviderRefusedError(f"'{key}' is not the key of a machine")
    name, _, rank = key.rpartition("-")
    return name, int(rank)
