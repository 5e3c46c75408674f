"""The drill task: it counts, writes checkpoints, and fails on demand in the ways of real tasks."""

import base64
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict

from perilune import watchdog
from perilune.bundle.job import Job, OutputKind
from perilune.bundle.plugin import Consumes
from perilune.bundle.workspace import Workspace
from perilune.errors import ProcessLostError, RequestError, WorkFailedError
from perilune.files import canonical_json, read_json, write_json

How = Literal[
    "", "raise", "request", "work", "exit7", "quit0", "segv", "kill", "enospc", "memory", "hang", "stubborn",
    "daemon", "nothing", "link", "fill", "stall", "stall_in_c", "leak",
]  # fmt: skip


class DrillSpec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    data: Annotated[str | None, Consumes("dataset")] = None
    steps: int = 3
    seconds: float = 0.0
    checkpoint_every: int = 1
    fail_at: int = -1
    how: How = ""
    fresh_only: bool = False  # fail only when not resumed from a checkpoint
    say: str = ""
    tell: str = ""  # print the value of this secret
    noise: bool = False  # write random bytes, so that no two runs are equal
    fail_rank: int = 0  # rank of the process that fails
    gate: str = ""  # wait at the first step until this file exists


class Drill:
    name = "drill"
    spec = DrillSpec
    produces: OutputKind = "dataset"
    output = "artifacts/data"

    def plan(self, job: Job) -> Mapping[str, str]:
        return {"steps": str(job.spec["steps"])}

    def run(self, workspace: Workspace) -> Mapping[str, Any]:
        spec = DrillSpec.model_validate(workspace.job.spec)
        total = 0
        if workspace.has_input("data"):
            total = read_json(workspace.input("data") / "total.json")["total"]
        start, total = self._resume(workspace, total)
        workspace.log(f"begins at step {start}; {spec.say}")
        if spec.tell:
            workspace.log(f"the secret is {workspace.secret(spec.tell)}.")
        if spec.noise:
            (workspace.artifacts / "noise").write_bytes(os.urandom(8))
        if spec.how == "link":
            (workspace.artifacts / "link").symlink_to("/etc/hostname")
        for step in range(start, spec.steps):
            self._wait_at(spec.gate, workspace)
            mine = int(os.environ.get("RANK", "0")) == spec.fail_rank
            if step == spec.fail_at and mine and not (spec.fresh_only and start > 0):
                self._fail(workspace, spec.how)
            time.sleep(spec.seconds)
            self._meet()
            total += (step + 1) * (workspace.job.seed + 1)
            workspace.metric(step + 1, total=total)
            if (step + 1) % spec.checkpoint_every == 0 and workspace.leads:
                self._checkpoint(workspace, step + 1, total)
            workspace.progress(step + 1, spec.steps, sum=total)
        if spec.how != "nothing" and workspace.leads:
            write_json(workspace.artifacts / "data" / "total.json", {"total": total})
        return {"kind": "dataset", "total": total, "began_at": start}

    def _wait_at(self, gate: str, workspace: Workspace) -> None:
        if gate and not Path(gate).exists():
            workspace.event("waits")
            while not Path(gate).exists():
                time.sleep(0.02)

    def _meet(self) -> None:
        """Wait for the other processes."""

    def _resume(self, workspace: Workspace, total: int) -> tuple[int, int]:
        found = sorted(workspace.checkpoints.glob("step-*"))
        if not found:
            workspace.rewind(0)
            return 0, total
        state = read_json(found[-1] / "state.json")
        workspace.rewind(state["step"])
        return state["step"], state["total"]

    def _checkpoint(self, workspace: Workspace, step: int, total: int) -> None:
        whole = workspace.checkpoints / f"step-{step:06d}"
        half = whole.with_name(f".{whole.name}.tmp")
        half.mkdir(parents=True)
        (half / "state.json").write_bytes(canonical_json({"step": step, "total": total}))
        half.rename(whole)
        workspace.event("checkpoint", step=step)

    def _fail(self, workspace: Workspace, how: How) -> None:
        match how:
            case "raise":
                raise KeyError("no such thing")
            case "request":
                raise RequestError("the dataset is not one", where="data.jsonl:3", remedy="write another")
            case "work":
                import yaml  # noqa: F401  # loaded late, as tasks load torch

                raise WorkFailedError("nothing was learnt")
            case "leak":  # through every channel that a task has
                value = workspace.secret(workspace.job.spec["tell"])
                _leak(workspace, value)
                raise KeyError(f"401 for the key {value}") from OSError(f"token={value!r}")
            case "exit7":
                sys.exit(7)
            case "quit0":
                os._exit(0)
            case "segv":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "enospc":
                with Path("/dev/full").open("wb", buffering=0) as full:
                    full.write(b"x")
            case "fill":
                with (workspace.artifacts / "big").open("wb", buffering=0) as big:
                    while True:
                        big.write(bytes(1 << 12))
            case "memory":
                raise MemoryError
            case "hang":
                workspace.event("hangs")
                time.sleep(600)
            case "stall":
                with watchdog.Watchdog("a drill", 0.3):
                    time.sleep(60)
            case "stall_in_c":
                watchdog.GRACE_SECONDS = 0.2
                with watchdog.Watchdog("a drill", 0.2):
                    re.match("(a*)*b", "a" * 40)  # keeps the interpreter's lock
            case "stubborn":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                workspace.event("hangs")
                time.sleep(600)
            case "daemon":
                code = (
                    "import os, signal, sys, time\n"
                    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
                    "if os.fork(): os._exit(0)\n"
                    "os.setsid()\n"
                    "if os.fork(): os._exit(0)\n"
                    "open(sys.argv[1] + '.partial', 'w').write(str(os.getpid()))\n"
                    "os.rename(sys.argv[1] + '.partial', sys.argv[1])\n"
                    "time.sleep(600)\n"
                )
                pid_file = workspace.runtime / "daemon.pid"
                subprocess.run([sys.executable, "-c", code, str(pid_file)], check=True)
                while not pid_file.exists():
                    time.sleep(0.01)
                workspace.event("hangs")
                time.sleep(600)


class GangDrill(Drill):
    """The drill in several processes on several machines, which synchronize at every step."""

    name = "gang_drill"
    parallel = True

    def __init__(self) -> None:
        self._lines: list[socket.socket] = []

    def _meet(self) -> None:
        if not self._lines and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            self._lines = self._connect()
        for line in self._lines:
            line.sendall(b".")
        for line in self._lines:
            try:
                arrived = line.recv(1)
            except ConnectionError:
                arrived = b""
            if not arrived:
                raise ProcessLostError("waited for a step, and another process has ended")

    def _connect(self) -> list[socket.socket]:
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if os.environ["RANK"] == "0":
            with socket.create_server(where) as server:
                server.settimeout(60.0)
                return [server.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
        until = time.monotonic() + 60.0
        while True:
            try:
                return [socket.create_connection(where)]
            except ConnectionRefusedError:
                if time.monotonic() > until:
                    raise ProcessLostError("the leading process has not come") from None
                time.sleep(0.05)


def _leak(workspace: Workspace, value: str) -> None:
    """Write a secret through every channel of a task, in the encodings that programs use."""
    encoded = value.encode()
    for form in (value, value[::-1], encoded.hex(), base64.b64encode(b"u:" + encoded).decode(), quote(value)):
        workspace.log(f"it is {form}")
        workspace.metric(1, note=form)
        workspace.event("leak", **{form: [form]})
        workspace.progress(1, 1, unit=form)
    write_json(workspace.artifacts / "own.json", {"header": f"Bearer {value}"})
    for part in (value[:3], value[3:], "\n", value[:5], "\n", value[5:], "\n"):
        os.write(1, part.encode())
        time.sleep(0.02)
    warnings.warn(value, stacklevel=1)


plugin = Drill()
gang = GangDrill()
