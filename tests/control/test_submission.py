"""Each submission creates exactly one run, despite repetition, concurrency and kills."""

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from drill_cases import begin, carry_out, drill_control, drill_job, drill_plan, wait_for
from fault_points import POINTS
from sqlalchemy import func, select

from perilune.bundle.freeze import freeze
from perilune.bundle.verify import verify
from perilune.control.record import home as home_module
from perilune.control.record.faults import KILL_AT
from perilune.control.record.store import Attempt, Operation, Run, verify_events
from perilune.control.runs.experiments import Control, advance
from perilune.control.runs.progress import StageFinished, StageReused
from perilune.control.runs.submission import Submission, submit_stage
from perilune.errors import RequestError

pytestmark = pytest.mark.xdist_group("crash sweep")  # the tests share one module fixture

CHILD = """
import json, os, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from drill_cases import carry_out, drill_control, drill_plan

def go(root):
    carry_out(drill_control(Path(root)), drill_plan(steps=2))

root, *points = sys.argv[1:]
if not points:
    go(root)
children = {{}}
for point in points:  # forked, so that every child has the imports
    children[point] = os.fork()
    if children[point] == 0:
        os.environ["{kill_at}"] = point
        go(os.path.join(root, point))
        os._exit(0)
ended = {{point: os.waitpid(pid, 0)[1] for point, pid in children.items()}}
print(json.dumps({{point: os.waitstatus_to_exitcode(status) for point, status in ended.items()}}))
"""


def submit_drill(control: Control, **spec: object) -> Run:
    submission = Submission(begin(control, [drill_plan()]), "drill", "drill")
    return submit_stage(control.home, control.store, submission, partial(freeze, drill_job(**spec), {}))


def run_directories(control: Control) -> list[str]:
    return [path.name for path in control.home.runs.iterdir()]


def command(root: Path, *points: str) -> subprocess.Popen[bytes]:
    """Start a process that runs one experiment in the home at `root`.

    With points, one experiment for each in its own home and process, which dies there; prints the exit codes.
    """
    code = CHILD.format(here=str(Path(__file__).parents[1] / "drill"), kill_at=KILL_AT)
    return subprocess.Popen([sys.executable, "-c", code, str(root), *points], stdout=subprocess.PIPE)


def test_same_bundle_returns_same_run(control: Control) -> None:
    first, second = (submit_drill(control) for _ in range(2))
    assert first.id == second.id
    assert run_directories(control) == [first.id]
    assert verify(control.home.bundle(first.id), first.bundle_digest) == []


def test_failed_freeze_leaves_no_files(control: Control, tmp_path: Path) -> None:
    experiment = begin(control, [drill_plan()])
    missing = partial(freeze, drill_job(), {"data": tmp_path / "absent"})
    with pytest.raises(RequestError):
        submit_stage(control.home, control.store, Submission(experiment, "drill", "drill"), missing)
    assert run_directories(control) == list(control.home.temporary.iterdir()) == []


@pytest.mark.thorough
def test_concurrent_commands_share_one_run(tmp_path: Path) -> None:
    root = tmp_path / "home"
    children = [command(root) for _ in range(3)]
    assert [child.wait() for child in children] == [0, 0, 0]
    control = drill_control(root)
    with control.store.snapshot() as session:
        run = session.scalars(select(Run)).one()
        assert run.state == "succeeded" and run.current_epoch == 1
        assert session.scalars(select(Attempt)).one().state == "succeeded"
        assert verify_events(session) is None
    assert run_directories(control) == [run.id]


def test_blocked_run_blocks_no_other_run(control: Control) -> None:
    stuck, other = submit_drill(control), submit_drill(control, steps=1)
    (control.home.run(stuck.id) / "template.json").write_text("{")

    def other_ended() -> bool:
        control.reconciler.reconcile_all()
        return control.run(other.id).state == "succeeded"

    wait_for(other_ended)
    (condition,) = control.reconciler.conditions.all(stuck.id)  # the error of the blocked run
    assert "template.json" in condition.message
    with pytest.raises(RequestError, match=r"template\.json"):  # commands for that run report it too
        control.reconciler.reconcile(stuck.id)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """For every named point, a home in which a command was killed there, and its exit code."""
    root = tmp_path_factory.mktemp("killed")
    output, _ = command(root, *POINTS).communicate()
    return {point: (root / point, status) for point, status in json.loads(output).items()}


@pytest.mark.parametrize("point", POINTS)
def test_next_command_recovers_after_kill_at_any_point(
    killed: dict[str, tuple[Path, int]], point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home_module, "SWEEP_AGE_S", 0.0)
    root, status = killed[point]
    assert status == -9, "the point was never reached"
    control = drill_control(root)
    control.reconciler.reconcile_all()  # every command starts with this
    events = carry_out(control, drill_plan(steps=2))
    assert isinstance(events[-1], StageFinished | StageReused)  # the worker may have finished in the meantime
    with control.store.snapshot() as session:
        run = session.scalars(select(Run)).one()
        assert (run.state, run.current_epoch) == ("succeeded", 1)
        assert session.scalars(select(Attempt)).one().manifest_digest == run.manifest_digest
        starts = session.scalar(select(func.count()).where(Operation.verb == "start"))
        assert starts in ({1, 2} if point.startswith("start") else {1})
        assert verify_events(session) is None
    assert run_directories(control) == [run.id]
    assert list(control.home.temporary.iterdir()) == []
    assert control.summary(run) == {"kind": "dataset", "total": 6, "began_at": 0}
    assert verify(control.directory(run), run.bundle_digest) == []
    control.store.close()


def test_reconciler_alone_completes_accepted_run(tmp_path: Path) -> None:
    output, _ = command(tmp_path, "submit.accepted").communicate()
    assert json.loads(output) == {"submit.accepted": -9}
    control = drill_control(tmp_path / "submit.accepted")
    deadline = time.monotonic() + 60
    while live := control.reconciler.reconcile_all():
        assert time.monotonic() < deadline, live
        time.sleep(0.05)
    with control.store.snapshot() as session:
        assert session.scalars(select(Run)).one().state == "succeeded"
    experiment = begin(control, [drill_plan(steps=2)])
    assert [type(event) for event in advance(control, experiment, [drill_plan(steps=2)])] == [StageReused]
