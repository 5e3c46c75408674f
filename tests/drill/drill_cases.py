"""Bundles, stages and homes for tests with the drill task in real processes. Both planes' tests use them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import select

from perilune.bundle.freeze import freeze
from perilune.bundle.job import Job, Resources
from perilune.control.record.home import Home
from perilune.control.record.store import Attempt, Run
from perilune.control.runs.experiments import Control, StagePlan, advance, register_experiment
from perilune.control.runs.planner import RetryPolicy
from perilune.control.runs.progress import StageEvent, StageProgress
from perilune.execution.claim import CLAIM_VARIABLE, read_claim
from perilune.execution.placements.upload import SENT_UNIT
from perilune.execution.processes import find_marked
from perilune.files import read_json

INSTALLED = Path(__file__).parent / "installed"  # a distribution with the task "drill"
PATIENCE = 300.0  # seconds; generous, because the machine may be busy
QUICK = RetryPolicy(base=0.01)

Command = Callable[..., tuple[int, str, str]]  # the fixture `perilune`: exit code, stdout and stderr


def drill_job(stage: str = "drill", *, secrets: tuple[str, ...] = (), seed: int = 1, **spec: Any) -> Job:
    return Job(
        task="drill",
        stage=stage,
        spec=spec,
        model={},
        environment={},
        seed=seed,
        resources=Resources(device="cpu", threads=1),
        secrets=secrets,
    )


def drill_plan(name: str = "drill", consumes: dict[str, str] | None = None, **spec: Any) -> StagePlan:
    consumed = consumes or {}
    return StagePlan(name, drill_job(name, **spec, **consumed), consumed)


def drill_bundle(path: Path, **spec: Any) -> Path:
    freeze(drill_job(**spec), {}, path)
    return path


def drill_control(root: Path, policy: RetryPolicy = QUICK) -> Control:
    return Control(Home.open(root), policy)


def begin(control: Control, plans: Iterable[StagePlan], name: str = "drills") -> str:
    document = {"name": name, "stages": [plan.job.model_dump(mode="json") for plan in plans]}
    return register_experiment(control, name, document, [(plan.name, plan.job.task) for plan in plans])


def carry_out(control: Control, *plans: StagePlan, name: str = "drills") -> list[StageEvent]:
    return list(advance(control, begin(control, plans, name), plans, poll=0.02))


def start_worker(bundle: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "perilune.execution.worker", str(bundle), *options]
    return subprocess.Popen(
        command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def verdict_of(bundle: Path) -> dict[str, Any]:
    return dict(read_json(bundle / "runtime" / "result.json"))


def wait_for(happened: Callable[[], Any], what: str = "the expected state") -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := happened()):
        assert time.monotonic() < deadline, f"{what} did not happen in {PATIENCE:.0f} s"
        time.sleep(0.01)
    return found


def family(bundle: Path) -> list[int]:
    """Process IDs of the live processes of an attempt, without its worker."""
    claim = read_claim(bundle / "runtime")
    return [] if claim is None else [process.pid for process in find_marked(CLAIM_VARIABLE, claim.nonce)]


def has_event(bundle: Path, kind: str) -> bool:
    path = bundle / "runtime" / "events.jsonl"
    return path.exists() and f'"{kind}"' in path.read_text()


def only_run(control: Control) -> Run:
    with control.store.snapshot() as session:
        return session.scalars(select(Run)).one()


def attempts(control: Control) -> list[Attempt]:
    with control.store.snapshot() as session:
        return list(session.scalars(select(Attempt).order_by(Attempt.number)))


def start(control: Control, plan: StagePlan) -> tuple[Iterator[StageEvent], Path]:
    """Advance until the first progress; return the remaining events and the attempt's directory."""
    events = advance(control, begin(control, [plan]), [plan], poll=0.02)
    wait_for_progress(events)
    return events, control.directory(only_run(control))


def wait_for_progress(events: Iterator[StageEvent]) -> None:
    """Advance until the task reports progress; a slow upload before it reports its own."""
    assert any(isinstance(event, StageProgress) and event.unit != SENT_UNIT for event in events)


def wait_for_second_checkpoint(control: Control) -> None:
    """Reconcile the only run until its second checkpoint is fetched."""
    run = only_run(control)
    second = control.directory(run) / "artifacts" / "checkpoints" / "step-000002"
    wait_for(lambda: control.reconciler.reconcile(run.id) and second.exists(), "the second checkpoint")


def hanging(control: Control, how: str = "hang") -> tuple[Iterator[StageEvent], Path]:
    """Start a run that hangs at its third step unless it was resumed."""
    plan = drill_plan(steps=4, fail_at=2, how=how, fresh_only=True)
    events, attempt = start(control, plan)
    wait_for(lambda: has_event(attempt, "hangs"), "the hang")
    return events, attempt


def worker_of(attempt: Path) -> int:
    claim = read_claim(attempt / "runtime")
    assert claim is not None
    return claim.pid
