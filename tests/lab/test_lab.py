"""The laboratory: a run succeeds despite injected faults, and the check finds each violated invariant."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from perilune.cli.main import main
from perilune.control.record.store import Attempt, Event, Machine, Run
from perilune.execution.providers.fake.weather import WEATHERS, FaultInjector, Weather, weather
from perilune.files import write_json
from perilune.lab.invariants import INVARIANTS, check_invariants
from perilune.lab.laboratory import Laboratory, Plan

pytestmark = pytest.mark.slow

ROUGH = Weather(
    seed=3, error_before=0.1, error_after=0.1, lost_answer=0.1, late_effect=0.3, late_seconds=0.5,
    visibility_seconds=0.2, boot_seconds=0.1, link_cuts=6.0, cut_seconds=0.5,
)  # fmt: skip


@pytest.fixture(scope="module")
def settled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    """A laboratory with one finished run that had injected faults and a killed control process."""
    folder = tmp_path_factory.mktemp("lab")
    with Laboratory(folder, Plan(ROUGH, seed=3, at_once=1, step_seconds=0.01)) as lab:
        lab.tick()
        lab.plan = Plan(ROUGH, seed=3, kills=1e6)
        lab.tick(submitting=False)
        lab.stop_failures()
        deadline = time.monotonic() + 200
        while not lab.is_settled():
            assert time.monotonic() < deadline, lab.snapshot()
            lab.tick(submitting=False)
            time.sleep(0.2)
        yield lab


def broken(lab: Laboratory) -> set[str]:
    return {verdict.name for verdict in check_invariants(lab) if verdict.broken}


def test_run_succeeds_and_all_invariants_hold(settled: Laboratory) -> None:
    assert [verdict.broken for verdict in check_invariants(settled)] == [()] * len(INVARIANTS)
    now = settled.snapshot()
    assert now.runs == {"succeeded": 1} and set(now.machines) == {"gone"} and now.cost > 0
    assert now.faults["controller_killed"] >= 1 and settled.read_bill()["alive"] == []


def test_check_finds_violated_invariants(settled: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    control = settled.control
    (run_id,) = settled.submitted
    run = control.run(run_id)
    attempt = control.directory(run)

    total = attempt / "artifacts" / "data" / "total.json"
    right = total.read_bytes()
    write_json(total, {"total": 1})
    assert broken(settled) == {"I1", "I3"}
    total.write_bytes(right)

    log = attempt / "runtime" / "runtime.log"
    lines = log.read_bytes()
    log.write_bytes(lines.replace(b"step 5", b"step 6"))
    assert broken(settled) == {"I5"}
    log.write_bytes(lines)

    settled.crashes = 1  # and restarted
    assert broken(settled) == {"I8"}
    settled.crashes = 0

    note = settled.folder / "home" / "note"
    note.write_text(f"it is {settled.canary}")
    assert broken(settled) == {"I7"}
    note.unlink()

    with monkeypatch.context() as patch:
        patch.setattr(settled, "read_bill", lambda: {"costs": {"perilune-x": 1.0}, "alive": ["perilune-x"]})
        assert broken(settled) == {"I4"}
    monkeypatch.setitem(settled.submitted, "01NEVER", 2)
    assert broken(settled) == {"I1"}
    monkeypatch.undo()

    with control.store.transaction() as session:
        twin = Attempt(
            run_id=run_id, number=99, state="succeeded", placement="fake", launcher="process", created=0.0
        )
        session.add(twin)
        last = session.get_one(Run, run_id)
        machine = session.query(Machine).first()
        assert machine is not None
        machine.state = "terminating"
        session.add(Event(time=0.0, run_id=last.id, kind="run.queued", detail={}, hash="?"))
    assert broken(settled) == {"I2", "I4", "I6"}


def test_weather_is_seeded_and_scripted_faults_come_first(tmp_path: Path) -> None:
    def faults_of(seed: int) -> list[str | None]:
        storm = FaultInjector(weather("stormy", seed), tmp_path / f"{seed}.jsonl")
        return [storm.fault_for("create", "key") for _ in range(200)]

    assert faults_of(1) == faults_of(1) != faults_of(2)
    calm = FaultInjector(WEATHERS["calm"], tmp_path / "calm.jsonl")
    calm.script("list", "lost_answer", 2)  # type: ignore[arg-type]
    assert [calm.fault_for("list", "") for _ in range(3)] == ["lost_answer", "lost_answer", None]
    assert calm.fault_for("create", "") is None and calm.injected == {"lost_answer": 2}


def test_lab_refuses_existing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["lab", "--keep", str(tmp_path)])
    assert left.value.code == 2 and "name a new folder" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_child_processes_end_with_killed_laboratory(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from perilune.execution.providers.fake.weather import Weather\n"
        "from perilune.execution.providers.protocol import MachineRequest\n"
        "from perilune.lab.laboratory import Laboratory, Plan\n"
        "with Laboratory(Path(sys.argv[1]), Plan(Weather(boot_seconds=0.01))) as lab:\n"
        "    lab.cloud.create('perilune-lab-01x-1-0', MachineRequest('small', 600.0))\n"
        "    print('made', flush=True)\n"
        "    time.sleep(600)\n"
    )
    folder = tmp_path / "lab"
    with subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE) as lab:
        assert lab.stdout is not None and lab.stdout.readline() == b"made\n"
        boxes: list[psutil.Process] = []
        controllers: list[psutil.Process] = []
        until = time.monotonic() + 60
        while not (boxes and controllers) and time.monotonic() < until:  # machines boot in the background
            family = [p for p in psutil.process_iter(["cmdline"]) if str(folder) in str(p.info["cmdline"])]
            boxes = [p for p in family if "box.py" in str(p.info["cmdline"])]
            controllers = [p for p in psutil.Process(lab.pid).children() if "reconcile" in p.cmdline()]
            time.sleep(0.05)
        if not (boxes and controllers):
            lab.kill()  # the end of the block waits for it
        assert boxes and controllers
        lab.kill()
        _, alive = psutil.wait_procs([*family, *controllers], timeout=60)
        assert alive == []
