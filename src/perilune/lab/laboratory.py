"""Submits short runs on rented machines of the fake cloud, and injects failures.

The ordinary control plane, `perilune reconcile --watch` in its own process, must recover from them. The lab
also kills the control plane at random.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from sqlalchemy import func, select

from perilune.bundle.freeze import freeze
from perilune.bundle.job import Job, Resources
from perilune.control.machines.budget import accrued_cost
from perilune.control.machines.leases import Lease
from perilune.control.machines.providers import PROVIDERS_FILE
from perilune.control.record.home import Home
from perilune.control.record.store import Attempt, Machine, Run
from perilune.control.record.transitions import RunState
from perilune.control.runs.experiments import Control, register_experiment
from perilune.control.runs.planner import Retry
from perilune.control.runs.submission import Submission, submit_stage
from perilune.control.runs.templates import RentedTarget, Template
from perilune.errors import PeriluneError
from perilune.execution.limits import AttemptLimits
from perilune.execution.placements.remote import Site
from perilune.execution.providers.fake import process as server
from perilune.execution.providers.fake.client import FakeCloud
from perilune.execution.providers.fake.weather import Weather
from perilune.files import read_json_lines
from perilune.lab.keeper import end_machines

CANARY = "PERILUNE_LAB_CANARY"  # a secret that every run gets and that must not appear in any file
STEPS = 8
LEASE = Lease(max_lifetime=300.0, idle=60.0, max_cost=0.05, ready_within=120.0)
DAILY_CAP = 1000.0
MAX_RUNS = 2000
UNFINISHED = (RunState.QUEUED.value, RunState.ACTIVE.value)


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a lab.

    Attributes:
        weather: rates of the cloud's failures.
        seed: of the lab's own random decisions.
        at_once: number of runs that the lab keeps unfinished at a time.
        step_seconds: duration of each of the `STEPS` steps of a run.
        kills: expected kills of the control process per minute. The cloud's server is killed half as often.
    """

    weather: Weather
    seed: int = 0
    at_once: int = 4
    step_seconds: float = 0.25
    kills: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a lab: counts by state, and injected faults by kind.

    Attributes:
        elapsed: seconds since the start of the lab.
        cost: of all machines so far, in currency units.
    """

    elapsed: float
    runs: dict[str, int]
    attempts: dict[str, int]
    machines: dict[str, int]
    faults: dict[str, int]
    cost: float


class Laboratory:
    """A home, a fake cloud and a control process in one folder.

    Use it as a context manager, which ends all processes and machines on exit.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self.canary = secrets.token_hex(16)
        self.cloud = FakeCloud(folder / "cloud")
        self.submitted: dict[str, int] = {}  # seeds by run id
        self.injected: Counter[str] = Counter()
        self.crashes = 0  # of the control process, not counting kills
        self._rng = random.Random(plan.seed)
        self._started_at = self._last_tick_at = time.monotonic()

    def __enter__(self) -> Laboratory:
        home = Home.open(self.folder / "home")
        provider = {
            "type": "fake",
            "folder": str(self.cloud.folder),
            "visibility_seconds": self.plan.weather.visibility_seconds,
        }
        settings = {"daily_cap": DAILY_CAP, "providers": {"fake": provider}}
        (home.root / PROVIDERS_FILE).write_text(yaml.safe_dump(settings))
        os.environ[CANARY] = self.canary
        self.control = Control(home)
        document: dict[str, Any] = {"name": "lab", "nonce": self.canary[:8]}
        stages = [(str(number), "rehearse") for number in range(1, MAX_RUNS + 1)]
        self.experiment = register_experiment(self.control, "lab", document, stages)
        self._server = server.start(self.cloud.folder, self.plan.weather)
        self._controller = self._start_controller()
        keeper = [sys.executable, "-m", "perilune.lab.keeper", str(self.cloud.folder), str(os.getpid())]
        self._keeper = subprocess.Popen(keeper, stdin=subprocess.DEVNULL, start_new_session=True)
        return self

    def __exit__(self, *_: object) -> None:
        for child in (self._controller, self._server, self._keeper):
            child.kill()
            child.wait()
        end_machines(self.cloud.folder)
        self.control.store.close()
        os.environ.pop(CANARY, None)

    def tick(self, *, submitting: bool = True) -> Snapshot:
        """Inject failures, submit runs up to the limit, and return the state."""
        self._inject_failures()
        if submitting:
            for _ in range(min(self.plan.at_once - self.count_unfinished(), MAX_RUNS - len(self.submitted))):
                self._submit_run()
        return self.snapshot()

    def count_unfinished(self) -> int:
        """Count the runs that have not ended."""
        with self.control.store.snapshot() as session:
            return session.scalar(select(func.count()).where(Run.state.in_(UNFINISHED))) or 0

    def is_settled(self) -> bool:
        """Return whether every run has ended and every machine is proven gone."""
        return not self.count_unfinished() and not self.control.reconciler.rentals.fleet.machines()

    def stop_failures(self) -> None:
        """Stop injecting failures, so that live runs can end: restart the cloud with calm weather."""
        server.stop(self._server)
        calm = Weather(seed=self.plan.seed, visibility_seconds=self.plan.weather.visibility_seconds)
        self._server = server.start(self.cloud.folder, calm)
        self.plan = replace(self.plan, weather=calm, kills=0.0)

    def snapshot(self) -> Snapshot:
        with self.control.store.snapshot() as session:
            runs, attempts, machines = (
                dict(session.execute(select(table.state, func.count()).group_by(table.state)).all())
                for table in (Run, Attempt, Machine)
            )
            cost = sum(accrued_cost(machine) for machine in session.scalars(select(Machine)))
        elapsed = time.monotonic() - self._started_at
        return Snapshot(elapsed, runs, attempts, machines, dict(self.count_faults()), cost)

    def count_faults(self) -> Counter[str]:
        """Count the injected faults by kind: those of the cloud, and the kills by the lab."""
        lines = read_json_lines(self.cloud.folder / "faults.jsonl")
        return Counter(line["fault"] for line in lines) + self.injected

    def _submit_run(self) -> None:
        seed = len(self.submitted) + 1
        job = Job(
            task="rehearse",
            stage=str(seed),
            spec={"steps": STEPS, "step_seconds": self.plan.step_seconds},
            model={},
            environment={},
            seed=seed,
            resources=Resources(device="cpu", threads=1),
            secrets=(CANARY,),
        )
        submission = Submission(self.experiment, str(seed), "rehearse", template=self.template())
        run = submit_stage(self.control.home, self.control.store, submission, partial(freeze, job, {}))
        self.submitted[run.id] = seed

    def template(self) -> Template:
        """Return the template of the runs: a machine of the fake cloud that uses this Python."""
        paths = [str(Path(p).absolute()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        environment = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
        site = Site(python=sys.executable, installed=True, environment=environment)
        target = RentedTarget(name="rented", provider="fake", kind="small", lease=LEASE, site=site)
        retry = Retry(infrastructure=1000, lost=1000, base=0.05, cap=2.0)
        limits = AttemptLimits(on_box_stop_after=60.0)
        return Template(placement=target, retry=retry, limits=limits, bring="all")

    def _inject_failures(self) -> None:
        """Kill the control process or the cloud's server at random, and restart dead ones."""
        now = time.monotonic()
        elapsed, self._last_tick_at = now - self._last_tick_at, now
        share = self.plan.kills * elapsed / 60.0
        if self._rng.random() < share:
            self.injected["controller_killed"] += 1
            self._controller.send_signal(signal.SIGKILL)
            self._controller.wait()
        if self._rng.random() < share / 2:
            self.injected["cloud_killed"] += 1
            server.stop(self._server)
        if self._controller.poll() is not None:
            self.crashes += self._controller.returncode != -signal.SIGKILL
            self._controller = self._start_controller()
        if self._server.poll() is not None:
            self._server = server.start(self.cloud.folder, self.plan.weather)

    def _start_controller(self) -> subprocess.Popen[bytes]:
        """Start `perilune reconcile --watch` in its own process."""
        with (self.folder / "controller.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "perilune.lab.keeper", "reconcile", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PERILUNE_HOME": str(self.control.home.root)},
            )

    def read_bill(self) -> dict[str, Any]:
        """Return the costs and live machines that the cloud reports; empty while it does not answer."""
        try:
            return dict(self.cloud.call("GET", "/bill"))
        except PeriluneError:
            return {}
