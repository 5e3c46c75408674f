"""Submission: one wish, one run, whoever asks, how often, and wherever the power fails."""

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from drill_cases import begin, carry_out, drill_control, drill_job, drill_plan, wait_for
from sqlalchemy import func, select

from perilune.bundle.freeze import freeze
from perilune.bundle.verify import verify
from perilune.control.record import home as home_module
from perilune.control.record.faults import KILL_AT, POINTS
from perilune.control.record.store import Attempt, Operation, Run, verify_events
from perilune.control.runs.experiments import Control, advance
from perilune.control.runs.progress import StageFinished, StageReused
from perilune.control.runs.submission import Submission, submit
from perilune.errors import RequestError

pytestmark = pytest.mark.xdist_group("crash sweep")  # one module fixture serves them all

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
for point in points:  # each of them begins with everything imported
    children[point] = os.fork()
    if children[point] == 0:
        os.environ["{kill_at}"] = point
        go(os.path.join(root, point))
        os._exit(0)
ended = {{point: os.waitpid(pid, 0)[1] for point, pid in children.items()}}
print(json.dumps({{point: os.waitstatus_to_exitcode(status) for point, status in ended.items()}}))
"""


def submit_drill(control: Control, key: str | None = None, **spec: object) -> Run:
    experiment = begin(control, [drill_plan()])
    job = drill_job(**spec)
    return submit(
        control.home, control.store, Submission(experiment, "drill", "drill", key), partial(freeze, job, {})
    )


def run_directories(control: Control) -> list[str]:
    return [path.name for path in control.home.runs.iterdir()]


def command(root: Path, *points: str) -> subprocess.Popen[bytes]:
    """A process that carries out one experiment in the home at `root`.

    With points, one in a home for each of them, in a process of its own that dies there; says how they ended.
    """
    code = CHILD.format(here=str(Path(__file__).parents[1] / "drill"), kill_at=KILL_AT)
    return subprocess.Popen([sys.executable, "-c", code, str(root), *points], stdout=subprocess.PIPE)


def test_the_same_key_is_the_same_run(control: Control) -> None:
    first, second = (submit_drill(control, "mine") for _ in range(2))
    assert first.id == second.id
    assert run_directories(control) == [first.id]
    assert verify(control.home.bundle(first.id), first.bundle_digest) == []


def test_the_same_key_for_another_bundle_is_a_conflict_and_leaves_nothing(control: Control) -> None:
    first = submit_drill(control, "mine")
    with pytest.raises(RequestError, match=f"key 'mine' was used for another bundle .run {first.id}"):
        submit_drill(control, "mine", steps=9)
    assert run_directories(control) == [first.id]
    assert list(control.home.temporary.iterdir()) == []


def test_a_job_that_cannot_be_frozen_leaves_nothing(control: Control, tmp_path: Path) -> None:
    experiment = begin(control, [drill_plan()])
    missing = partial(freeze, drill_job(), {"data": tmp_path / "absent"})
    with pytest.raises(RequestError):
        submit(control.home, control.store, Submission(experiment, "drill", "drill"), missing)
    assert run_directories(control) == list(control.home.temporary.iterdir()) == []


@pytest.mark.thorough
def test_commands_at_once_share_one_run(tmp_path: Path) -> None:
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


def test_what_keeps_a_run_from_going_on_keeps_no_other(control: Control) -> None:
    stuck, other = submit_drill(control, "a"), submit_drill(control, "b", steps=1)
    (control.home.run(stuck.id) / "template.json").write_text("{")

    def other_ended() -> bool:
        control.reconciler.all()
        return control.run(other.id).state == "succeeded"

    wait_for(other_ended)
    (condition,) = control.reconciler.conditions.all(stuck.id)  # which is told all the same
    assert "template.json" in condition.message
    with pytest.raises(RequestError, match=r"template\.json"):  # who follows that run is told as well
        control.reconciler.one(stuck.id)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """For every named point, a home in which a command was killed exactly there, and how it ended."""
    root = tmp_path_factory.mktemp("killed")
    said, _ = command(root, *POINTS).communicate()
    return {point: (root / point, status) for point, status in json.loads(said).items()}


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_anywhere_heals(
    killed: dict[str, tuple[Path, int]], point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home_module, "SWEEP_AFTER", 0.0)
    root, status = killed[point]
    assert status == -9, "the point was never reached"
    control = drill_control(root)
    control.reconciler.all()  # what any next command begins with
    events = carry_out(control, drill_plan(steps=2))
    assert isinstance(events[-1], StageFinished | StageReused)  # the worker may have ended meanwhile
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


def test_an_accepted_run_is_carried_out_by_the_reconciler_alone(tmp_path: Path) -> None:
    said, _ = command(tmp_path, "submit.accepted").communicate()
    assert json.loads(said) == {"submit.accepted": -9}
    control = drill_control(tmp_path / "submit.accepted")
    deadline = time.monotonic() + 60
    while live := control.reconciler.all():
        assert time.monotonic() < deadline, live
        time.sleep(0.05)
    with control.store.snapshot() as session:
        assert session.scalars(select(Run)).one().state == "succeeded"
    experiment = begin(control, [drill_plan(steps=2)])
    assert [type(event) for event in advance(control, experiment, [drill_plan(steps=2)])] == [StageReused]
