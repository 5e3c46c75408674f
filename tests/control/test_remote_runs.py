"""Runs on a remote machine whose connection is cut, corrupts data, or leads to another machine.

The machine is this one, reached through a host that the tests control; tests/execution uses a real sshd.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

import pytest
from drill_cases import (
    INSTALLED,
    PATIENCE,
    Command,
    begin,
    drill_control,
    drill_plan,
    has_event,
    only_run,
    wait_for,
)
from fault_points import POINTS, REMOTE_POINTS
from hosts_cases import NearbyHost, interpreter
from kill_cases import killed_at_every_point

from perilune.bundle import scripts
from perilune.bundle.verify import Difference, verify
from perilune.cli.train import lifecycle
from perilune.control.evidence.attestation import removed_artifacts
from perilune.control.evidence.verification import find_run_problems
from perilune.control.queries.lookup import list_attempts
from perilune.control.runs import placements
from perilune.control.runs.experiments import Control, StagePlan, advance, follow_run, read_progress
from perilune.control.runs.planner import Retry
from perilune.control.runs.progress import StageEvent, StageFailed, StageFinished, StageNotice
from perilune.control.runs.requests import cancel_run, retry_run
from perilune.control.runs.templates import SshTarget, Template
from perilune.execution.background import in_background
from perilune.execution.claim import CLAIM_VARIABLE, read_claim
from perilune.execution.hosts.protocol import Answer, HostUnreachableError
from perilune.execution.limits import AttemptLimits
from perilune.execution.placements.protocol import Capabilities
from perilune.execution.placements.remote import RemotePlacement, Site
from perilune.execution.processes import find_marked
from perilune.files import read_json, read_json_lines

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("remote")]


class Elsewhere:
    """A remote machine and the template for it."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.host = NearbyHost()
        self.workspace = folder / "workspace"
        site = Site(python=str(python), installed=True, workspace=str(self.workspace))
        there = SshTarget(host="nearby", site=site)
        self.template = Template(placement=there, retry=Retry(base=0.01))

    def limited(self, **bounds: Any) -> None:
        self.template = self.template.model_copy(update={"limits": AttemptLimits(**bounds)})

    def brings(self, what: str) -> None:
        self.template = self.template.model_copy(update={"bring": what})

    def cut(self, when: str = "before") -> None:
        self.host.cut = lambda verb: when

    def restore(self) -> None:
        self.host.cut = lambda verb: ""

    def files(self, epoch: int = 1) -> Path:
        """The folder of an attempt's files on the machine."""
        (folder,) = self.workspace.glob(f"*/{epoch}")
        return folder

    def claim(self, epoch: int = 1) -> dict[str, Any]:
        (claim,) = self.workspace.glob(f"*/claim.{epoch}.json")
        return dict(read_json(claim))

    def working(self, epoch: int = 1) -> list[int]:
        """Live processes of an attempt's task on the machine."""
        claim = read_claim(self.files(epoch) / "runtime")
        return [] if claim is None else [process.pid for process in find_marked(CLAIM_VARIABLE, claim.nonce)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return interpreter(tmp_path_factory.mktemp("python") / "python", grace=1.0)


@pytest.fixture
def box(tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    box = Elsewhere(tmp_path / "box", python)
    monkeypatch.setattr(placements, "SshHost", lambda settings, folder: box.host)
    monkeypatch.setattr(RemotePlacement, "capabilities", Capabilities(is_remote=True, look_interval_s=0.1))
    yield box
    for path in box.workspace.glob("*/claim.*.json"):
        claim = read_json(path)
        if claim["pid"] != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(claim["pid"], signal.SIGKILL)


def carry_out(control: Control, box: Elsewhere, plan: StagePlan) -> list[StageEvent]:
    return list(advance(control, begin(control, [plan]), [plan], template=box.template, poll=0.05))


def hanging(control: Control, box: Elsewhere, how: str = "hang") -> Path:
    """Start a run that hangs at its third step unless resumed; return its local folder of fetched files."""
    plan = drill_plan(steps=4, fail_at=2, how=how, fresh_only=True)
    events = advance(control, begin(control, [plan]), [plan], template=box.template, poll=0.05)
    next(events)
    run_id = only_run(control).id
    attempt = control.home.attempt(run_id, 1)

    def pulled() -> bool:
        control.reconciler.reconcile(run_id)
        second = attempt / "artifacts" / "checkpoints" / "step-000002"
        return has_event(attempt, "hangs") and (second.exists() or box.template.bring != "all")

    wait_for(pulled, "the second checkpoint")
    return attempt


def finish(control: Control) -> StageEvent:
    return list(follow_run(control, only_run(control).id, poll=0.05))[-1]


def states(control: Control) -> list[tuple[str, str]]:
    return [(attempt.state, attempt.cause) for attempt in list_attempts(control, only_run(control).id)]


def totals(control: Control) -> list[int]:
    path = control.directory(only_run(control)) / "artifacts" / "metrics.jsonl"
    return [row["total"] for row in read_json_lines(path)]


@pytest.mark.thorough
def test_every_verb_survives_cuts_before_and_after_execution(control: Control, box: Elsewhere) -> None:
    times: Counter[str] = Counter()

    def cut(verb: str) -> str:
        times[verb] += 1
        return {1: "before", 2: "after"}.get(times[verb], "")

    box.host.cut = cut
    last = carry_out(control, box, drill_plan(steps=3))[-1]
    assert isinstance(last, StageFinished)
    while control.reconciler.unclean_attempts():
        control.reconciler.reconcile_all()
    assert states(control) == [("succeeded", "")]
    assert {verb for verb, n in times.items() if n > 1} == {
        *("receive", "start", "look", "stop", "hold", "remove")
    }
    run = only_run(control)
    assert verify_run(control) == [] and totals(control) == [2, 6, 12]
    assert [attempt.cleanup for attempt in list_attempts(control, run.id)] == ["done"]
    left = sorted(path.name for path in box.workspace.glob("0*/*"))
    assert left == ["claim.1.json", "lock"]  # the fencing files stay


@pytest.mark.thorough
def test_run_survives_command_killed_at_every_point(box: Elsewhere, tmp_path: Path) -> None:
    root, plan = tmp_path / "killed", drill_plan(steps=2, fail_at=1, how="kill", fresh_only=True)

    def command() -> None:
        again = drill_control(root)
        next(advance(again, begin(again, [plan]), [plan], template=box.template))
        while again.reconciler.reconcile_all() or again.reconciler.unclean_attempts():
            time.sleep(0.05)

    points = killed_at_every_point(command, tmp_path / "points")
    assert set(points) == {*POINTS, *REMOTE_POINTS}, "a point without a kill, or a kill without a named point"
    control = drill_control(root)
    run = only_run(control)
    assert states(control) == [("failed", "killed"), ("succeeded", "")] and totals(control) == [2, 6]
    assert verify_run(control) == []
    left = {path.name for path in box.workspace.glob(f"{run.id}/*")}
    assert left == {"claim.1.json", "claim.2.json", "lock"}
    control.store.close()


def test_run_survives_broken_link(control: Control, box: Elsewhere, tmp_path: Path) -> None:
    plan = drill_plan(steps=3, gate=str(tmp_path / "gate"), say="as it was printed")
    next(advance(control, begin(control, [plan]), [plan], template=box.template))
    run_id = only_run(control).id
    here = control.home.attempt(run_id, 1)
    log = here / "runtime" / "runtime.log"
    wait_for(lambda: control.reconciler.reconcile(run_id) and log.exists(), "a local log")
    box.cut()
    (tmp_path / "gate").touch()
    wait_for((box.files() / "runtime" / "result.json").exists, "the end of the worker")

    def unreachable() -> bool:
        control.reconciler.reconcile(run_id)
        (attempt,) = list_attempts(control, run_id)
        return (attempt.state, attempt.reachability) == ("running", "unreachable")

    wait_for(unreachable, "the unreachable state")
    box.restore()
    assert isinstance(finish(control), StageFinished)
    assert states(control) == [("succeeded", "")]
    assert log.read_bytes() == (here / "artifacts" / "task.log").read_bytes()  # no gap and no duplicate


@pytest.mark.thorough
def test_machine_that_lost_all_files_costs_one_checkpoint_interval(control: Control, box: Elsewhere) -> None:
    box.brings("all")
    hanging(control, box)
    lose_all_files(box)
    last = finish(control)
    assert isinstance(last, StageFinished) and last.summary["began_at"] == 2
    assert states(control) == [("failed", "runner_died"), ("succeeded", "")]
    assert totals(control) == [2, 6, 12, 20]


def lose_all_files(box: Elsewhere) -> None:
    """The machine loses the attempt and all of its files."""
    os.kill(box.claim()["pid"], signal.SIGKILL)
    wait_for(lambda: not box.working(), "the end of the task after its keeper")
    shutil.rmtree(box.workspace)


def test_checkpoints_stay_on_machine_and_next_attempt_resumes_from_them(
    control: Control, box: Elsewhere
) -> None:
    attempt = hanging(control, box)
    os.kill(box.claim()["pid"], signal.SIGKILL)
    times: Counter[str] = Counter()

    def cut(verb: str) -> str:
        times[verb] += verb in {"hold", "remove"}
        return {1: "after"}.get(times[verb], "")  # the first response is lost, and the request repeated

    box.host.cut = cut
    last = finish(control)
    assert isinstance(last, StageFinished) and last.summary["began_at"] == 2
    assert states(control) == [("failed", "runner_died"), ("succeeded", "")]
    run = only_run(control)
    assert totals(control) == [2, 6, 12, 20] and verify_run(control) == []
    made = [control.home.attempt(run.id, number) / "artifacts" / "checkpoints" for number in (1, 2)]
    assert not any(folder.exists() for folder in made) and attempt.parent == made[0].parents[1].parent
    assert list(find_run_problems(control, run)) == [] and control.is_intact(run)
    left = sorted(path.name for path in box.workspace.glob(f"{run.id}/*"))
    assert left == ["claim.1.json", "claim.2.json", "lock"]


def test_abandoned_attempt_is_ended_and_resumed(control: Control, box: Elsewhere) -> None:
    hanging(control, box)
    half = box.files() / "artifacts" / "checkpoints" / ".step-000003.tmp"  # as during a write
    half.mkdir()
    (half / "state.json").write_text("{")
    nonce = read_claim(box.files() / "runtime").nonce  # type: ignore[union-attr]
    run_id = only_run(control).id
    box.cut()
    assert cancel_run(control, run_id, force=True).state == "cancelled"
    box.restore()
    assert find_marked(CLAIM_VARIABLE, nonce)
    again = retry_run(control, run_id).id
    lives: list[bool] = []

    def cut(verb: str) -> str:
        if verb == "hold":
            lives.append(bool(find_marked(CLAIM_VARIABLE, nonce)))
        return {1: "after"}.get(len(lives), "") if verb == "hold" else ""  # and the request is repeated

    box.host.cut = cut
    last = list(follow_run(control, again, poll=0.05))[-1]
    assert isinstance(last, StageFinished) and last.summary["began_at"] == 2
    assert len(lives) > 1 and not any(lives)  # no process writes to held files
    assert not list(box.workspace.glob(f"{again}/*/artifacts/checkpoints/.*"))


def test_follow_run_reports_that_the_machine_is_unreachable_and_reachable_again(
    control: Control, box: Elsewhere
) -> None:
    hanging(control, box)
    run_id = only_run(control).id
    notices = (event for event in follow_run(control, run_id, poll=0.05) if isinstance(event, StageNotice))
    box.cut()
    assert next(notices).message == "its machine is unreachable: the line is cut"
    box.restore()
    control.reconciler.reset_backoff(run_id)
    assert next(notices).message == "reachable again"
    assert cancel_run(control, run_id).state == "cancelled"


def test_run_fails_at_once_if_the_workspace_cannot_be_written(control: Control, box: Elsewhere) -> None:
    box.workspace.parent.mkdir(exist_ok=True)
    box.workspace.write_text("a file")
    plan = drill_plan(steps=1)
    last = list(advance(control, begin(control, [plan]), [plan], template=box.template, poll=0.05))[-1]
    assert isinstance(last, StageFailed) and "the workspace cannot be written" in last.message
    (attempt,) = list_attempts(control, last.run_id)
    assert (attempt.state, attempt.cleanup) == ("failed", "done")


def verify_run(control: Control) -> list[Difference]:
    run = only_run(control)
    return verify(
        control.directory(run), run.bundle_digest, removed_artifacts(control.home, run.id, run.current_epoch)
    )


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["forgets", "evicts"])
def test_attempt_reports_restart_from_beginning_when_checkpoint_is_lost(
    control: Control, box: Elsewhere, how: str
) -> None:
    hanging(control, box)
    if how == "forgets":
        lose_all_files(box)
    else:
        os.kill(box.claim()["pid"], signal.SIGKILL)

    def evict(verb: str) -> str:
        if verb == "receive" and how == "evicts":
            for path in (box.workspace / "store.sha256").glob("*"):
                path.unlink()
        return ""

    box.host.cut = evict
    run_id = only_run(control).id
    notices = (event for event in follow_run(control, run_id, poll=0.05) if isinstance(event, StageNotice))
    message = (
        "the attempt starts from the beginning, because the checkpoint of step 2 was only on the machine"
    )
    assert next(notices).message.startswith(message)
    second = control.home.attempt(run_id, 2)
    wait_for(
        lambda: control.reconciler.reconcile(run_id) and has_event(second, "hangs"), "the third step again"
    )
    assert totals(control) == [2, 6]
    assert cancel_run(control, run_id).state == "cancelled"


@pytest.mark.thorough
def test_files_deleted_between_staging_and_start_are_sent_again(control: Control, box: Elsewhere) -> None:
    def cut(verb: str) -> str:
        if verb == "start" and box.host.calls.count("start") == 1:
            shutil.rmtree(box.workspace)
        return ""

    box.host.cut = cut
    assert isinstance(carry_out(control, box, drill_plan(steps=1))[-1], StageFinished)
    assert states(control) == [("failed", "start_failed"), ("succeeded", "")]


@pytest.mark.thorough
def test_reused_process_id_does_not_count_as_alive(control: Control, box: Elsewhere) -> None:
    hanging(control, box)
    (path,) = box.workspace.glob("*/claim.1.json")
    claim = box.claim()
    os.kill(claim["pid"], signal.SIGKILL)
    text = path.read_text().replace(claim["boot_id"], "before").replace(str(claim["pid"]), str(os.getpid()))
    path.write_text(text)
    assert isinstance(finish(control), StageFinished)
    assert states(control)[0] == ("failed", "runner_died")


def test_cancel_ends_remote_processes_and_keeps_fetched_checkpoints(control: Control, box: Elsewhere) -> None:
    box.brings("all")
    attempt = hanging(control, box, "daemon")
    before = len(box.host.calls)
    control.reconciler.reset_backoff(only_run(control).id)
    control.reconciler.reconcile(only_run(control).id)
    assert box.host.calls[before:] == ["look"]  # one call fetches everything new
    claim = read_claim(box.files() / "runtime")
    assert claim is not None and len(box.working()) == 2
    assert cancel_run(control, only_run(control).id).state == "cancelled"
    assert not find_marked(CLAIM_VARIABLE, claim.nonce)
    assert states(control) == [("cancelled", "stopped")]
    assert verify(attempt) == [] and (attempt / "artifacts" / "checkpoints" / "step-000002").exists()


class Stalled(NearbyHost):
    """A machine whose second upload stalls after its first bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.stalls, self.let_go, self.sent = Event(), Event(), 0

    def run(self, command: Any, *, source: BinaryIO | None = None, **rest: Any) -> Answer:
        if command[5] != "receive" or self.calls.count("receive") != 1:
            return super().run(command, source=source, **rest)
        self.calls.append("receive")
        assert source is not None
        with os.fdopen(os.dup(source.fileno()), "rb") as own:  # as a child process would
            self.sent = len(own.read(1000))
            self.stalls.set()
            assert self.let_go.wait(PATIENCE)
            self.sent += len(own.read())
        self.let_go.clear()
        raise HostUnreachableError("the upload ended early")


def test_cancel_does_not_wait_for_upload(control: Control, box: Elsewhere) -> None:
    box.host = host = Stalled()
    plan = drill_plan()
    experiment = begin(control, [plan])
    uploading = in_background(
        lambda: list(advance(control, experiment, [plan], template=box.template, poll=0.05))
    )
    assert host.stalls.wait(PATIENCE)
    run_id = only_run(control).id
    assert cancel_run(drill_control(control.home.root), run_id).state == "cancelled"
    assert isinstance(uploading.result(PATIENCE)[-1], StageFailed)
    assert states(control) == [("cancelled", "stopped")] and "start" not in host.calls
    host.let_go.set()  # nothing has read the upload so far
    wait_for(lambda: not host.let_go.is_set(), "the end of the stream")
    (wheel,) = control.home.bundle(run_id).glob("scripts/*.whl")
    assert host.sent < wheel.stat().st_size and read_progress(control.home.attempt(run_id, 1)) is None


def test_wait_ends_at_its_timeout_during_an_upload(
    control: Control, box: Elsewhere, perilune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "LOOK_SECONDS", 1.0)
    box.host = host = Stalled()
    plan = drill_plan()
    next(advance(control, begin(control, [plan]), [plan], template=box.template))
    deadline = time.monotonic() + PATIENCE
    while not host.stalls.is_set():  # a slow machine may begin the upload only in a later call
        assert time.monotonic() < deadline
        code, out, _ = perilune("wait", "drill", "--timeout", "0.5")
        assert code == 124 and out == "drill: active, not ended after 0.5 s\n"
    host.let_go.set()
    assert cancel_run(control, only_run(control).id).state == "cancelled"


def test_time_limit_fails_run_without_retry(
    control: Control, box: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.limited(max_lifetime=4.0)
    last = carry_out(control, box, drill_plan(fail_at=1, how="hang"))[-1]
    assert isinstance(last, StageFailed) and last.cause == "timeout"
    assert last.message == "it took longer than max_lifetime, 4 s"
    assert only_run(control).current_epoch == 1 and verify_run(control) == []


@pytest.mark.parametrize("how", ["truncated", "flipped"])
def test_damaged_bundle_is_not_started(control: Control, box: Elsewhere, how: str) -> None:
    spoilt: list[int] = []

    def bend(data: bytes) -> bytes:
        if box.host.calls[-1] != "receive" or spoilt:
            return data
        spoilt.append(len(data))
        cut = data.rindex(b'[["') + 20  # inside the list of files
        return data[:cut] + (b"" if how == "truncated" else bytes([data[cut] ^ 1]) + data[cut + 1 :])

    box.host.bend = bend
    assert isinstance(carry_out(control, box, drill_plan(steps=1))[-1], StageFinished)
    assert states(control) == [("failed", "transfer_failed"), ("succeeded", "")]
    assert box.host.calls.count("start") == 1 and not list(box.workspace.glob("*/tmp.*"))


def test_refused_host_fails_run_before_any_upload(control: Control, box: Elsewhere) -> None:
    box.host.refuses = True
    last = carry_out(control, box, drill_plan(steps=1))[-1]
    assert isinstance(last, StageFailed) and last.cause == "host_refused"
    assert set(box.host.calls) == {"look"}


def test_secret_reaches_remote_task_and_is_stored_nowhere(
    control: Control, box: Elsewhere, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    value = "canary-5d1e77"
    monkeypatch.setenv("DRILL_TOKEN", value)
    job = drill_plan(steps=1, tell="DRILL_TOKEN", gate=str(tmp_path / "gate")).job
    plan = StagePlan("drill", job.model_copy(update={"secrets": ("DRILL_TOKEN",)}))
    next(advance(control, begin(control, [plan]), [plan], template=box.template))
    run_id = only_run(control).id
    log = control.home.attempt(run_id, 1) / "runtime" / "runtime.log"
    wait_for(
        lambda: control.reconciler.reconcile(run_id) and log.exists() and log.read_bytes(), "the local log"
    )
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.is_dir()]
    assert not any(value.encode() in line for line in lines)
    there = [path for path in box.workspace.rglob("*") if path.is_file()]
    assert not any(value.encode() in path.read_bytes() for path in there)
    (tmp_path / "gate").touch()
    assert isinstance(finish(control), StageFinished)
    assert "the secret is [DRILL_TOKEN]." in log.read_text()
    assert not any(
        value.encode() in path.read_bytes() for path in control.home.root.rglob("*") if path.is_file()
    )


def test_missing_secret_is_named_before_start(control: Control, box: Elsewhere) -> None:
    job = drill_plan(steps=1).job.model_copy(update={"secrets": ("DRILL_ABSENT",)})
    last = carry_out(control, box, StagePlan("drill", job))[-1]
    assert isinstance(last, StageFailed) and last.cause == "request_error" and "DRILL_ABSENT" in last.message
    assert "start" not in box.host.calls


def test_interpreter_without_required_packages_is_refused(
    control: Control, box: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "requirements_lock", lambda task: "pydantic==1.0\n")
    last = carry_out(control, box, drill_plan(steps=1))[-1]
    assert isinstance(last, StageFailed) and last.cause == "request_error"
    assert "lacks packages that the bundle needs: pydantic==1.0" in last.message


def test_remote_environment_is_built_from_bundle_without_package_index(
    control: Control, box: Elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "requirements_lock", lambda task: "")  # packages are on PYTHONPATH
    lent = [str(INSTALLED), *(path for path in sys.path if path.endswith("site-packages"))]
    site = Site(
        python=sys.executable,
        workspace=str(box.workspace),
        environment={
            "PERILUNE_HOME": str(tmp_path / "there"),
            "PYTHONPATH": os.pathsep.join(lent),
            "PIP_NO_INDEX": "1",
            "PIP_NO_DEPS": "1",
        },
    )
    there = SshTarget(host="nearby", site=site)
    box.template = box.template.model_copy(update={"placement": there})
    assert isinstance(carry_out(control, box, drill_plan(steps=1))[-1], StageFinished)
    artifacts = control.directory(only_run(control)) / "artifacts"
    prefix = read_json(artifacts / "precheck.json")["python"]["prefix"]
    assert prefix.startswith(str(tmp_path / "there" / "environments"))


def test_template_is_recorded_with_the_run(control: Control, box: Elsewhere) -> None:
    plan = drill_plan(steps=1)
    next(advance(control, begin(control, [plan]), [plan], template=box.template))
    run = only_run(control)
    again = drill_control(control.home.root)
    assert again.reconciler.placements.get(run.id).name == "nearby"
    assert again.reconciler.placements.retry_policy(run.id).lost_after == AttemptLimits().given_up_after
    assert cancel_run(control, run.id).state == "cancelled"


def test_machine_without_perilune_is_not_retried(
    control: Control, box: Elsewhere, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The Python there has the package but no `perilune` command, so a retry would fail in the same way."""
    python = interpreter(tmp_path / "bare")
    (python.parent / "perilune").unlink()
    site = Site(python=str(python), installed=True, workspace=str(box.workspace))
    box.template = box.template.model_copy(update={"placement": SshTarget(host="nearby", site=site)})
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    last = carry_out(control, box, drill_plan(steps=1))[-1]
    assert isinstance(last, StageFailed) and last.cause == "request_error"
    assert "perilune" in last.message and "try: install" in last.message
    assert len(list_attempts(control, only_run(control).id)) == 1
