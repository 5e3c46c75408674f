"""Runs on a machine behind a jump host: the system's OpenSSH, real sshds, and links that go down."""

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from drill_cases import begin, drill_plan, has_event, wait_for
from hosts_cases import interpreter
from network_cases import Network, network

from perilune.bundle.verify import verify
from perilune.control.queries.lookup import list_attempts
from perilune.control.record.store import Attempt
from perilune.control.runs import reconcile
from perilune.control.runs.experiments import Control, StagePlan, advance, follow_run
from perilune.control.runs.planner import Retry
from perilune.control.runs.progress import StageFailed, StageFinished
from perilune.control.runs.requests import cancel_run
from perilune.control.runs.templates import SshTarget, Template
from perilune.execution import limits
from perilune.execution.claim import CLAIM_VARIABLE, read_claim
from perilune.execution.hosts import ssh
from perilune.execution.hosts.protocol import HostUnreachableError
from perilune.execution.hosts.ssh import SshHost, SshSettings
from perilune.execution.limits import AttemptLimits
from perilune.execution.placements.protocol import Capabilities
from perilune.execution.placements.remote import RemotePlacement, Site
from perilune.execution.processes import find_marked
from perilune.files import read_json, read_json_lines

pytestmark = pytest.mark.xdist_group("network")
IMPATIENT = {"ConnectTimeout": "2", "ServerAliveInterval": "1", "ServerAliveCountMax": "1"}


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    folder = tmp_path_factory.mktemp("net")
    interpreter(folder / "python", grace=1.0)
    with network(folder / "machines") as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{made.folder}/bin", prepend=":")
        for name, value in IMPATIENT.items():
            patch.setitem(ssh.SSH_OPTIONS, name, value)
        patch.setattr(RemotePlacement, "capabilities", Capabilities(is_remote=True, look_interval_s=0.1))
        patch.setattr(reconcile, "MAX_PAUSE_S", 0.3)
        yield made
        SshHost(made.settings(), folder).disconnect()


class Far:
    """Runs of a home on the remote machine."""

    def __init__(self, control: Control, net: Network, folder: Path) -> None:
        self.control, self.net, self.workspace = control, net, folder / "workspace"
        python = net.folder.parent / "python" / "bin" / "python"
        site = Site(python=str(python), installed=True, workspace=str(self.workspace))
        target = SshTarget(**net.settings().model_dump(), site=site)
        self.template = Template(placement=target, retry=Retry(base=0.01), bring="all")

    def submit(self, plan: StagePlan) -> str:
        experiment = begin(self.control, [plan], plan.name)
        return next(advance(self.control, experiment, [plan], template=self.template)).run_id

    def look(self, run_id: str) -> Attempt | None:
        """Observe now; return the current attempt, if there is one."""
        self.control.reconciler.reset_backoff(run_id)
        self.control.reconciler.reconcile(run_id)
        return (list_attempts(self.control, run_id) or [None])[-1]

    def until(self, run_id: str, is_so: Callable[[Attempt], Any]) -> None:
        wait_for(lambda: (seen := self.look(run_id)) is not None and is_so(seen), "the expected state")

    def finish(self, run_id: str) -> object:
        self.control.reconciler.reset_backoff(run_id)
        return list(follow_run(self.control, run_id, poll=0.05))[-1]

    def states(self, run_id: str) -> list[tuple[str, str]]:
        return [(attempt.state, attempt.cause) for attempt in list_attempts(self.control, run_id)]

    def here(self, run_id: str, epoch: int = 1) -> Path:
        return self.control.home.attempt(run_id, epoch)

    def there(self, run_id: str, epoch: int = 1) -> Path:
        return self.workspace / run_id / str(epoch)

    def hanging(self, stage: str = "drill") -> str:
        """A run that hangs at its third step unless it was resumed; its checkpoint is already fetched."""
        run_id = self.submit(drill_plan(stage, steps=4, fail_at=2, how="hang", fresh_only=True))
        home = self.here(run_id)
        checkpoint = home / "artifacts" / "checkpoints" / "step-000002"
        self.until(run_id, lambda _: has_event(home, "hangs") and checkpoint.exists())
        return run_id


@pytest.fixture
def far(control: Control, net: Network, tmp_path: Path) -> Iterator[Far]:
    yield Far(control, net, tmp_path)
    for link in (net.near, net.far):
        link.restore()
    for claim in (tmp_path / "workspace").glob("*/*/runtime/claim.json"):
        for process in find_marked(CLAIM_VARIABLE, read_claim(claim.parent).nonce):  # type: ignore[union-attr]
            process.kill()


def unreachable(attempt: Attempt) -> bool:
    return attempt.reachability == "unreachable"


def reachable(attempt: Attempt) -> bool:
    return attempt.reachability == "reachable"


def test_failed_test_leaves_no_machine_or_network_behind(tmp_path: Path, net: Network) -> None:
    with pytest.raises(ZeroDivisionError), network(tmp_path / "machines") as made:
        machines = (made.here, made.jump, made.box)
        subprocess.run([*made.box.inside("--pid", "--net"), "setsid", "--fork", "sleep", "600"], check=True)
        assert all(machine.processes() for machine in machines)
        raise ZeroDivisionError
    assert not any(machine.processes() for machine in machines)
    there = subprocess.run(["lsns", "--type", "net"], capture_output=True, text=True, check=True).stdout
    numbers = [str(machine.network).strip("net:[]") for machine in (*machines, net.box)]
    assert [number in there for number in numbers] == [False, False, False, True]


def test_run_behind_jump_host_survives_cuts_of_both_links(far: Far, net: Network, tmp_path: Path) -> None:
    straight = SshSettings(host="10.77.2.1", config=str(net.folder / "config"))
    with pytest.raises(HostUnreachableError, match="unreachable"):
        SshHost(straight, tmp_path).run(["true"])
    before = net.box.connections()
    run_id = far.submit(drill_plan(steps=3, gate=str(tmp_path / "gate"), say="as it was printed"))
    log = far.here(run_id) / "runtime" / "runtime.log"
    far.until(run_id, lambda _: log.exists())
    assert net.box.connections() == before + 1  # one connection for about ten commands

    net.near.cut()
    far.until(run_id, unreachable)
    net.near.restore()
    far.until(run_id, reachable)

    net.far.cut()
    (tmp_path / "gate").touch()
    wait_for((far.there(run_id) / "runtime" / "result.json").exists, "the end of the remote worker")
    far.until(run_id, unreachable)
    assert far.states(run_id) == [("running", "")]
    net.far.restore()
    assert isinstance(far.finish(run_id), StageFinished)
    (attempt,) = list_attempts(far.control, run_id)
    assert (attempt.state, attempt.cleanup) == ("succeeded", "done")
    run = far.control.run(run_id)
    assert verify(far.control.directory(run), run.bundle_digest) == [] and not far.there(run_id).exists()
    assert log.read_bytes() == (far.here(run_id) / "artifacts" / "task.log").read_bytes()


@pytest.mark.thorough
def test_attempt_unreachable_for_too_long_stops_and_its_result_is_ignored(
    far: Far, net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STOP_MARGIN_S", 2.0)
    monkeypatch.setattr(limits, "STOP_GRACE_S", 1.0)
    bounds = AttemptLimits(on_box_stop_after=5.0, lost_after=8.0)
    far.template = far.template.model_copy(update={"limits": bounds})
    ends = far.submit(drill_plan("ends", steps=2, noise=True, gate=str(tmp_path / "gate")))
    hangs = far.hanging("hangs")
    far.until(ends, lambda attempt: attempt.state == "running")
    nonce = read_claim(far.there(hangs) / "runtime").nonce  # type: ignore[union-attr]
    net.near.cut()
    (tmp_path / "gate").touch()  # one run ends unobserved, the other hangs

    def both_lost() -> bool:
        far.control.reconciler.reset_backoff(ends)
        far.control.reconciler.reset_backoff(hangs)
        far.control.reconciler.reconcile_all(act=False)
        return far.states(ends) == far.states(hangs) == [("lost", "unreachable")]

    wait_for(both_lost, "the loss of both attempts")
    assert not find_marked(CLAIM_VARIABLE, nonce)  # the attempt stopped itself
    net.near.restore()
    for run_id, why in ((ends, ""), (hangs, "no contact for 5 s")):
        assert isinstance(far.finish(run_id), StageFinished)
        assert far.states(run_id) == [("lost", "unreachable"), ("succeeded", "")]
        wait_for(
            lambda: (
                not far.control.reconciler.reconcile_all() and not far.control.reconciler.unclean_attempts()
            ),
            "the cleanup",
        )
        late = read_json(far.here(run_id) / "runtime" / "result.json")
        assert late["message"] == why  # the late verdict is collected as evidence, but not accepted
        first, second = list_attempts(far.control, run_id)
        assert first.manifest_digest is None and second.manifest_digest != late["manifest_digest"]
        assert far.control.run(run_id).manifest_digest == second.manifest_digest
    rows = read_json_lines(far.here(hangs, 2) / "artifacts" / "metrics.jsonl")
    assert [row["total"] for row in rows] == [2, 6, 12, 20]


@pytest.mark.thorough
def test_changed_host_key_fails_new_run_and_makes_active_run_unreachable(far: Far, net: Network) -> None:
    for seed, machine in enumerate((net.box, net.jump)):
        with machine.replaced():
            before = machine.connections()
            last = far.finish(far.submit(drill_plan(f"at{seed}")))
            assert isinstance(last, StageFailed) and last.cause == "host_refused", last
            assert "Host key verification failed" in last.message and machine.connections() == before
    assert not far.workspace.exists()
    run_id = far.hanging()
    for machine, link in ((net.box, net.far), (net.jump, net.near)):
        link.cut()
        with machine.replaced():
            before = machine.connections()
            link.restore()
            far.until(run_id, unreachable)
            time.sleep(0.2)
            far.look(run_id)
            assert far.states(run_id) == [("running", "")] and machine.connections() == before
        far.until(run_id, reachable)
    assert cancel_run(far.control, run_id).state == "cancelled"
    assert far.states(run_id) == [("cancelled", "stopped")]


@pytest.mark.thorough
def test_cut_session_resumes_transfers_and_starts_worker_once(
    far: Far, net: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upload and download resume after the cut, and the worker starts once."""
    calls: list[str] = []
    cut: list[str] = []
    run = SshHost.run

    def half_done(verb: str) -> Callable[[], bool]:
        sent = net.far.carried()
        return {
            "receive": lambda: any(far.workspace.glob("*/tmp.*/*")),
            "start": lambda: any(far.workspace.glob("*/claim.1.json")),
            "look": lambda: net.far.carried() - sent > 30_000,
        }[verb]

    def watched(self: SshHost, command: list[str], **options: Any) -> Any:
        verb = command[5]
        calls.append(verb)
        if verb not in {"receive", "start", "look"} or verb in cut:
            return run(self, command, **options)
        ended, there = threading.Event(), half_done(verb)

        def cut_when_half_done() -> None:
            while not ended.is_set():
                if there():
                    cut.append(verb)
                    net.box.cut_sessions()
                    break
                time.sleep(0.002)

        striking = threading.Thread(target=cut_when_half_done)
        striking.start()
        try:
            return run(self, command, **options)
        finally:
            ended.set()
            striking.join()

    monkeypatch.setattr(SshHost, "run", watched)
    with net.far.slowed("16mbit"):
        run_id = far.submit(drill_plan(steps=2, say="\n".join(f"line {n} of many" for n in range(8000))))
        assert isinstance(far.finish(run_id), StageFinished)
    assert cut == ["receive", "start", "look"], calls
    assert calls.count("start") == 1
    (attempt,) = list_attempts(far.control, run_id)
    assert (attempt.state, attempt.cleanup) == ("succeeded", "done")
    assert verify(far.here(run_id)) == []
    log = (far.here(run_id) / "runtime" / "runtime.log").read_bytes()
    assert log == (far.here(run_id) / "artifacts" / "task.log").read_bytes() and b"line 7999 of" in log
