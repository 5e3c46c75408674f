"""The processes of a task on one machine: one, or several that work together and end together.

The first process leads, and its log is the run's log. Each other process has its own folder in runtime/ for
its log and its failure report. The environment variables that distinguish processes and machines are those of
torchrun.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from perilune.bundle.job import Job
from perilune.bundle.secret_sources import register_secrets
from perilune.errors import RequestError
from perilune.execution.log import LogPump, write_whole_log
from perilune.execution.task_environment import make_task_environment
from perilune.execution.verdict import FAILURE_FILE, Cause, Ending, find_ending
from perilune.redaction import KNOWN_SECRETS

RENDEZVOUS = "PERILUNE_RENDEZVOUS"  # variable: a file through which the processes find each other
POLL_SECONDS = 0.1
LOST_SECONDS = 3.0  # to wait for a process's own report after another process has reported its loss


@dataclass(frozen=True, slots=True)
class Node:
    """This machine among the machines of a task.

    Attributes:
        number: from 0 to count - 1; machine 0 leads.
        count: number of machines.
        address, port: rendezvous of the leading process; "" and 0 for a single machine.
    """

    number: int = 0
    count: int = 1
    address: str = ""
    port: int = 0

    @classmethod
    def from_environment(cls, job: Job) -> Node:
        """Return the node in torchrun's variables; a single node without them or for a job of one node."""
        count = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        if job.resources.nodes == 1 or count == 1:
            return cls()
        number, port = int(os.environ["GROUP_RANK"]), int(os.environ["MASTER_PORT"])
        return cls(number, count, os.environ["MASTER_ADDR"], port)

    def variables(self) -> dict[str, str]:
        """Return the variables that `from_environment` reads."""
        numbers = {"GROUP_RANK": self.number, "GROUP_WORLD_SIZE": self.count, "MASTER_PORT": self.port}
        return {"MASTER_ADDR": self.address} | {name: str(number) for name, number in numbers.items()}


def wait_for_end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait up to `seconds` until a child ends. `Popen.wait` with a timeout would poll every 50 ms."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # a system without this call
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return
    try:
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        waiting.poll(1000 * seconds)
    finally:
        os.close(descriptor)


class Ranks:
    """The processes of one task on this machine.

    Args:
        mark: variables that identify the attempt's processes.
        echo: copy the leader's output to stdout.
    """

    def __init__(self, bundle: Path, job: Job, mark: dict[str, str], *, echo: bool = False) -> None:
        self._bundle, self._job, self._mark, self._echo = bundle, job, mark, echo
        self._node = Node.from_environment(job)
        self._first = self._node.number * job.resources.processes
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pumps: list[LogPump] = []
        self._statuses: list[int | None] = []
        self._rendezvous: Path | None = None

    @property
    def _world(self) -> int:
        return self._node.count * self._job.resources.processes

    @property
    def root(self) -> int:
        """The id of the common ancestor of all processes: the only one, or else this process."""
        return self._processes[0].pid if len(self._processes) == 1 else os.getpid()

    def start(self) -> None:
        """Start all processes.

        Raises:
            RequestError: a secret of the job is not set on this machine.
        """
        count = self._job.resources.processes
        register_secrets(self._job.secrets)
        environment = make_task_environment(self._job, self._mark)
        if self._node.count > 1:
            environment |= self._node.variables() | find_interface_variables(self._node.address)
        elif count > 1:
            self._rendezvous = Path(tempfile.mkdtemp(prefix="perilune-"))
            environment |= {RENDEZVOUS: str(self._rendezvous / "processes")}
        for local in range(count):
            rank = self._first + local
            own = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": self._world}
            variables = {name: str(number) for name, number in own.items()} if self._world > 1 else {}
            self._processes.append(self._start(rank, environment | variables))

    def _start(self, rank: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        directory = rank_directory(self._bundle, rank)
        directory.mkdir(exist_ok=True)
        (directory / FAILURE_FILE).unlink(missing_ok=True)
        pump = LogPump(directory, KNOWN_SECRETS, echo=self._echo and rank == 0)
        self._pumps.append(pump)
        module = "perilune.execution.task_process"
        return subprocess.Popen(
            [sys.executable, "-m", module, str(self._bundle), str(os.getpid())],
            cwd=self._bundle,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=pump.writer,
            stderr=pump.writer,
            start_new_session=True,
        )

    def wait(self, is_stopping: Callable[[], bool]) -> bool:
        """Wait until all have succeeded or one has failed; False if `is_stopping` returned True before."""
        while not self._is_over():
            if is_stopping():
                return False
            if self._statuses[0] is None:
                wait_for_end(self._processes[0], POLL_SECONDS)
            else:
                time.sleep(POLL_SECONDS)
        until = time.monotonic() + LOST_SECONDS
        while self._only_lost() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        self._is_over()
        return True

    def _is_over(self) -> bool:
        self._statuses = [process.poll() for process in self._processes]
        return any(self._statuses) or None not in self._statuses

    def _only_lost(self) -> bool:
        failures = self._failures(False)
        return bool(failures) and all(ending.cause is Cause.PROCESS_LOST for _, ending in failures)

    def _failures(self, memory_kill: bool) -> list[tuple[int, Ending]]:
        """Return the processes that have failed or have reported a failure, with their endings."""
        found = []
        for rank, status in enumerate(self._statuses, start=self._first):
            report = rank_directory(self._bundle, rank) / FAILURE_FILE
            if status or (status is None and report.exists()):
                found.append((rank, find_ending(status or 1, report, stopped=False, memory_kill=memory_kill)))
        return found

    def ending(self, *, stopped: bool, memory_kill: bool) -> Ending:
        """Return how the task ended; of several failures, the one that most likely caused the others.

        Args:
            stopped, memory_kill: as for `find_ending`.
        """
        if stopped:
            report = rank_directory(self._bundle, self._first) / FAILURE_FILE
            return find_ending(self._processes[0].wait(), report, stopped=True, memory_kill=memory_kill)
        failures = self._failures(memory_kill)
        if not failures:
            return Ending(0, None, Cause.NONE, "")
        rank, ending = min(failures, key=_guilt_order)
        if self._world == 1:
            return ending
        log = f", see {rank_log(self._bundle, rank).relative_to(self._bundle)}" if rank else ""
        message = f"process {rank} of {self._world}{log}: {ending.message}"
        return Ending(ending.exit_code, ending.signal, ending.cause, message)

    def close(self) -> None:
        """Make the logs durable; call it when all processes have ended."""
        for pump in self._pumps:
            pump.close()
        if self._rendezvous is not None:
            shutil.rmtree(self._rendezvous, ignore_errors=True)


def rank_directory(bundle: Path, rank: int) -> Path:
    """Return the directory of a process's log and failure report."""
    return bundle / "runtime" / f"process-{rank}" if rank else bundle / "runtime"


def write_logs(bundle: Path) -> None:
    """Write the kept logs of this machine's processes to artifacts/."""
    others = [int(path.name.partition("-")[2]) for path in (bundle / "runtime").glob("process-*")]
    for rank in (0, *others):
        write_whole_log(rank_directory(bundle, rank), rank_log(bundle, rank))


def find_interface_variables(address: str) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use the network interface that reaches `address`.

    Raises:
        RequestError: the address is unreachable.
    """
    try:
        (family, kind, _, _, where), *_ = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:  # connecting chooses the interface, and sends nothing
            probe.connect(where)
            local = probe.getsockname()[0]
    except OSError as error:
        raise RequestError(
            f"the leading machine {address} cannot be reached: {error}",
            remedy="check the network between the machines",
        ) from None
    for name, addresses in psutil.net_if_addrs().items():
        if any(item.address.partition("%")[0] == local for item in addresses):
            return {
                variable: os.environ.get(variable, name)
                for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            }
    return {}


def rank_log(bundle: Path, rank: int) -> Path:
    """Return the path of a process's complete log in the artifacts."""
    return bundle / "artifacts" / (f"task.{rank}.log" if rank else "task.log")


def _guilt_order(failure: tuple[int, Ending]) -> tuple[bool, bool, int]:
    """Sort key: first processes that a signal other than SIGTERM ended, last those that lost another."""
    rank, ending = failure
    return ending.cause is Cause.PROCESS_LOST, ending.signal in {None, signal.SIGTERM}, rank
