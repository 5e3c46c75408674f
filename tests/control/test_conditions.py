"""An error of a run, host, provider or machine is a condition of that run; all other work continues."""

import errno
import itertools
import subprocess
import sys
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from cloud_cases import LEASE, SMALL, bill, rent_from, rented, tend_until
from drill_cases import PATIENCE, Command, begin, drill_plan, wait_for
from hosts_cases import interpreter

from perilune.control.machines.lifecycle import Fleet
from perilune.control.machines.providers import Providers
from perilune.control.queries.explanation import explain_run
from perilune.control.queries.lookup import run_document
from perilune.control.record.store import Attempt, Machine, Run
from perilune.control.record.transitions import AttemptState, MachineState, RunState
from perilune.control.runs import experiments
from perilune.control.runs.experiments import Control, advance, follow_run
from perilune.control.runs.placements import Placements
from perilune.control.runs.progress import StageFailed, StageProgress
from perilune.control.runs.requests import request_cancel, stream_log
from perilune.control.runs.templates import TEMPLATE_FILE, RentedTarget, Template
from perilune.errors import PeriluneError, RequestError, WorkFailedError
from perilune.execution.background import in_background
from perilune.execution.claim import Claim
from perilune.execution.hosts.protocol import HostRefusedError, HostUnreachableError
from perilune.execution.observation import Observation
from perilune.execution.placements.protocol import Capabilities
from perilune.execution.processes import Presence
from perilune.execution.providers.fake.client import FakeCloud
from perilune.execution.providers.protocol import (
    ProviderRefusedError,
)
from perilune.execution.verdict import Cause, Verdict
from perilune.files import write_json

pytestmark = pytest.mark.slow

VERBS = ("stage", "start", "is_starting", "observe", "pull", "stop", "remove")
ERRORS = (
    HostUnreachableError("the line is cut"),
    RequestError("its disk is full"),
    WorkFailedError("what came is not what was sent"),
    OSError(errno.EIO, "the medium is broken"),
    KeyError("claim"),
)
CALLS = ("list", "create", "terminate", "capabilities")
REFUSALS = (ProviderRefusedError("a quota"), OSError(errno.EIO, "the medium is broken"), KeyError("machines"))
SHORT = LEASE.model_copy(update={"max_lifetime": 2.0})


class Failing:
    """A placement on which an attempt fails at once, and one verb raises an error."""

    name, launcher = "failing", "process"
    capabilities = Capabilities(is_remote=True, look_interval_s=0.0)

    def __init__(self, verb: str, error: Exception) -> None:
        self.verb, self.error, self.started = verb, error, False

    def _call(self, verb: str) -> None:
        if verb == self.verb:
            raise self.error

    def stage(self, *_: Any) -> None:
        self._call("stage")

    def start(self, attempt: Any) -> None:
        self._call("start")
        self.started = True

    def is_starting(self, attempt: Any) -> bool:
        self._call("is_starting")
        return False

    def observe(self, attempt: Any) -> Observation:
        self._call("observe")
        if not self.started:
            return Observation()
        verdict = Verdict(attempt.epoch, 7, None, Cause.EXITED, "exit code 7", None, 1.0)
        claim = Claim(attempt.epoch, "there", "boot", 1, 1, "nonce")
        return Observation(claim, Presence.ABSENT, verdict)

    def pull(self, attempt: Any, *, whole: bool = False) -> None:
        self._call("pull")

    def stop(self, attempt: Any) -> bool:
        self._call("stop")
        return True

    def remove(self, attempt: Any) -> None:
        self._call("remove")


class Slow(Failing):
    """A placement whose uploads block until the test sets `let_go`."""

    def __init__(self) -> None:
        super().__init__("", KeyError())
        self.uploads, self.let_go = Event(), Event()

    def stage(self, *_: Any) -> None:
        self.uploads.set()
        assert self.let_go.wait(PATIENCE)


class FailingProvider:
    """A provider with one call that raises an error; all other calls go to a working provider."""

    def __init__(self, inner: FakeCloud, call: str, error: Exception) -> None:
        self._inner, self._call_that_fails, self._error = inner, call, error

    def __getattr__(self, name: str) -> Any:
        if name == self._call_that_fails:
            if name == "capabilities":
                raise self._error

            def fail(*_: Any) -> Any:
                raise self._error

            return fail
        return getattr(self._inner, name)


def waiting_run(control: Control, run_id: str) -> str:
    """An accepted run that no command has started, without a bundle."""
    experiment = begin(control, [drill_plan()])
    control.home.run(run_id).mkdir()
    with control.store.transaction() as session:
        session.add(
            Run(
                id=run_id, submit_key=run_id, experiment_id=experiment, stage="drill", task="drill",
                bundle_digest=run_id, created=time.time(),
            )
        )  # fmt: skip
    return run_id


def submitted(control: Control, template: Template | None = None, **spec: Any) -> str:
    plan = drill_plan(**spec)
    event = next(advance(control, begin(control, [plan], "others"), [plan], template=template))
    return event.run_id


def conditions_of(control: Control, run_id: str) -> list[str]:
    return [condition["message"] for condition in run_document(control, control.run(run_id))["conditions"]]


def check_other_runs_continue(control: Control, perilune: Command, fleet: Fleet, cloud: FakeCloud) -> None:
    """Check that another run succeeds with a readable log, an expired lease ends, and no command fails."""
    key = rented(control, fleet)
    tend_until(fleet, key, MachineState.READY)
    with control.store.transaction() as session:
        session.get_one(Machine, key).lease = LEASE.model_copy(update={"max_lifetime": 0.1}).model_dump()
    healthy = submitted(control, steps=1, noise=True)

    def others_have_ended() -> bool:
        control.reconciler.reconcile_all()
        done = control.run(healthy).state == "succeeded"
        return done and fleet.machine(key).state == "gone"  # type: ignore[union-attr]

    wait_for(others_have_ended, "the end of the other run and of its machine")
    assert key in bill(cloud)["costs"] and key not in bill(cloud)["alive"]
    assert "".join(stream_log(control, healthy))
    for command in (
        ("runs",), ("runs", "--all", "--json"), ("logs", healthy), ("explain", healthy), ("events",),
        ("reconcile",), ("gc",), ("cost",), ("machines", "list"), ("top", "--once"),
    ):  # fmt: skip
        code, _, err = perilune(*command)
        assert code == 0, (command, err)
    assert perilune("machines", "reap")[0] in {0, 1}  # 1: something is not proven gone yet


def ends_attempt(verb: str, error: Exception) -> bool:
    """Whether the error of a verb ends the attempt instead of becoming a condition."""
    connection = isinstance(error, HostUnreachableError | HostRefusedError)
    own = isinstance(error, PeriluneError) and not connection
    return (verb in {"stage", "start"} and own) or (verb == "pull" and isinstance(error, WorkFailedError))


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> dict[str, Failing]:
    """Failing placements by run id."""
    faults: dict[str, Failing] = {}
    real = Placements.get
    monkeypatch.setattr(Placements, "get", lambda self, run_id: faults.get(run_id) or real(self, run_id))
    return faults


def explains(control: Control, run_id: str, words: str) -> bool:
    """Whether `explain` shows these words; if not, reconcile once more."""
    if words in " ".join(explain_run(control, run_id).because):
        return True
    control.reconciler.reconcile_all()
    return False


@pytest.mark.thorough
def test_placement_errors_become_conditions_of_their_run(
    control: Control, perilune: Command, fleet: Fleet, cloud: FakeCloud, faulty: dict[str, Failing]
) -> None:
    cases = list(itertools.product(VERBS, ERRORS))
    runs = {waiting_run(control, f"01FAULT{number:02}"): case for number, case in enumerate(cases)}
    faulty |= {run_id: Failing(*case) for run_id, case in runs.items()}
    check_other_runs_continue(control, perilune, fleet, cloud)
    for run_id, (verb, error) in runs.items():
        words = "the medium is broken" if isinstance(error, OSError) else str(error)
        if ends_attempt(verb, error):
            wait_for(
                lambda run=run_id: control.reconciler.reconcile_all() and control.run(run).state == "failed"
            )
            assert words in control.run(run_id).message or verb == "pull", (verb, error)
        else:
            # A condition ends with its attempt, and comes back when the next attempt meets the same error.
            wait_for(
                lambda run=run_id, text=words: explains(control, run, text),
                f"the condition for {error} of {verb}",
            )
        if verb in {"stop", "remove"}:
            assert control.run(run_id).state == "failed", (verb, error)
            assert words in conditions_of(control, run_id)[0], (verb, error)
        faulty[run_id].verb = ""  # repaired
    for run_id in runs:
        control.reconciler.reset_backoff(run_id)

    def conditions_cleared() -> bool:
        control.reconciler.reconcile_all()
        return all(
            RunState(control.run(run).state).is_terminal and not conditions_of(control, run) for run in runs
        )

    wait_for(conditions_cleared, "the end of all conditions")


@pytest.mark.thorough
def test_provider_errors_become_conditions_of_their_machine(
    control: Control, perilune: Command, fleet: Fleet, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = {f"bad-{number}": case for number, case in enumerate(itertools.product(CALLS, REFUSALS))}
    failing = {name: FailingProvider(cloud, *case) for name, case in cases.items()}
    real = Providers.get
    monkeypatch.setattr(Providers, "get", lambda self, name: failing.get(name) or real(self, name))
    runs = []
    for number, name in enumerate([*cases, "missing"]):
        run_id = waiting_run(control, f"01BAD{number:02}")
        runs.append(run_id)
        rental = SMALL.model_copy(update={"provider": name, "lease": SHORT})
        rented(control, fleet, rental, run_id=run_id)
        target = RentedTarget(name="rented", provider=name, kind="small", lease=SHORT)
        write_json(
            control.home.run(run_id) / TEMPLATE_FILE, Template(placement=target).model_dump(mode="json")
        )
        with control.store.transaction() as session:
            run = session.get_one(Run, run_id)
            run.state, run.current_epoch = RunState.ACTIVE.value, 1
            attempt = session.get_one(Attempt, (run_id, 1))
            attempt.state = AttemptState.PROVISIONING.value
    check_other_runs_continue(control, perilune, fleet, cloud)
    assert "no provider is called 'missing'" in " ".join(explain_run(control, run_id).because)

    (control.home.root / "providers.yaml").write_text("daily_cap: nonsense\n")
    for command in (("runs",), ("machines", "list"), ("reconcile",), ("explain", run_id)):
        code, _, err = perilune(*command)
        assert code == 0, (command, err)
    rent_from(control.home.root, cloud.folder, names=("fake", "missing", *cases))
    failing.clear()

    for run_id in runs:
        if not RunState(control.run(run_id).state).is_terminal:
            request_cancel(control, run_id)

    def conditions_cleared() -> bool:
        control.reconciler.reconcile_all()
        return not fleet.machines() and not control.reconciler.conditions.all()

    wait_for(conditions_cleared, "the end of all machines and conditions")
    assert not bill(cloud)["alive"]


def test_slow_upload_blocks_nothing_else(
    control: Control, fleet: Fleet, cloud: FakeCloud, faulty: dict[str, Failing]
) -> None:
    slow, other = waiting_run(control, "01SLOW"), waiting_run(control, "01THEN")
    faulty |= {slow: (stuck := Slow()), other: Failing("", KeyError())}
    key = rented(control, fleet)
    tend_until(fleet, key, MachineState.READY)
    with control.store.transaction() as session:
        session.get_one(Machine, key).lease = SHORT.model_dump()

    def others_have_ended() -> bool:
        control.reconciler.reconcile_all(patience=0.0)
        return control.run(other).state == "failed" and fleet.machine(key).state == "gone"  # type: ignore[union-attr]

    wait_for(others_have_ended, "the end of the other run and of the lease")
    assert stuck.uploads.is_set() and control.run(slow).state == "active"
    assert key not in bill(cloud)["alive"]
    # This pass finds the run locked by the transfer of an earlier pass.
    control.reconciler.reconcile_all(patience=0.0)
    stuck.let_go.set()
    wait_for(lambda: control.run(slow).state == "failed", "the end of the run")
    assert [run.state for run in control.reconciler.reconcile_all(patience=0.0) if run.id == slow] == [
        "failed"
    ]
    assert slow not in {run.id for run in control.reconciler.reconcile_all(patience=0.0)}


def test_watched_upload_keeps_leases(
    control: Control, fleet: Fleet, faulty: dict[str, Failing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiments, "LOOK_TIMEOUT_S", 0.1)
    slow = waiting_run(control, "01SLOW")
    faulty[slow] = stuck = Slow()
    key = rented(control, fleet)
    tend_until(fleet, key, MachineState.READY)
    with control.store.transaction() as session:
        session.get_one(Machine, key).lease = SHORT.model_dump()
    control.reconciler.rentals._managed_runs.add("01RUN")
    attempts = control.home.attempt(slow, 1).parent
    attempts.mkdir()
    write_json(attempts / "1.sent-0.json", {"done": 1, "total": 3, "unit": "bytes sent", "figures": {}})
    watching = in_background(lambda: list(follow_run(control, slow, poll=0.02)))
    wait_for(lambda: fleet.machine(key).state == "gone", "the end of the lease")  # type: ignore[union-attr]
    assert stuck.uploads.is_set() and control.run(slow).state == "active"
    stuck.let_go.set()
    first, *_, last = watching.result(PATIENCE)
    assert isinstance(first, StageProgress) and (first.done, first.unit) == (1, "bytes sent")
    assert isinstance(last, StageFailed)


ISOLATED = ["unshare", "--user", "--map-root-user", "--mount"]
FULL = 'mount -t tmpfs -o size=48k none "$3" && { cat /dev/zero > "$3/full"; exec "$@"; }'
SCENARIO = f"""
import subprocess, sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "drill")!r})
from pathlib import Path
from drill_cases import begin, drill_control, drill_plan, wait_for
from hosts_cases import interpreter
from perilune.control.runs.experiments import advance
from perilune.control.runs.placements import Placements
from perilune.control.runs.requests import stream_log
from perilune.execution.hosts.local import LocalHost
from perilune.execution.limits import AttemptLimits
from perilune.execution.placements.remote import RemotePlacement, Site

box, python = sys.argv[1:3]
control = drill_control(Path(sys.argv[3]))
there = RemotePlacement(LocalHost("box"), Site(python=python, installed=True, workspace=box), AttemptLimits())

def submitted(name, **spec):
    plan = drill_plan(**spec)
    return next(advance(control, begin(control, [plan], name), [plan])).run_id

first, second = submitted("first", steps=1), submitted("second", steps=2, noise=True)
real = Placements.get
Placements.get = lambda self, run_id: there if run_id == first else real(self, run_id)

def states():
    control.reconciler.reconcile_all()
    return control.run(first).state == "failed" and control.run(second).state == "succeeded"

wait_for(states, "the end of both runs")
assert control.run(first).cause == "disk_full", control.run(first).message
assert "".join(stream_log(control, second))
print([str(one) for one in control.reconciler.conditions.all()])
subprocess.run(["mount", "-o", "remount,size=1m", box], check=True)
control.reconciler.reconcile_all()
print([str(one) for one in control.reconciler.conditions.all()], len(control.reconciler.unclean_attempts()))
"""


def test_full_remote_disk_blocks_no_other_run(tmp_path: Path) -> None:
    if subprocess.run([*ISOLATED, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs unshare(1) with user namespaces: sysctl kernel.unprivileged_userns_clone=1")
    box, script = tmp_path / "box", tmp_path / "scenario.py"
    box.mkdir()
    script.write_text(SCENARIO)
    python = interpreter(tmp_path / "python")
    arguments = [str(script), str(box), str(python), str(tmp_path / "home")]
    command = ["sh", "-c", FULL, "sh", sys.executable, *arguments]
    done = subprocess.run([*ISOLATED, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    full, freed = done.stdout.splitlines()
    assert "cleanup of attempt 1" in full and "disk is full" in full
    assert freed == "[] 0"
