"""Attempts on several rented machines: all or none are rented, and the failure of one ends the attempt."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from cloud_cases import SMALL, an_attempt, bill, end, rented_template, tend_until
from drill_cases import PATIENCE, attempts, begin, drill_job, only_run, wait_for_second_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from perilune.bundle.job import Job
from perilune.bundle.verify import verify
from perilune.control.machines.lifecycle import Fleet
from perilune.control.machines.rented import RENDEZVOUS_PORTS
from perilune.control.queries.explanation import explain_run
from perilune.control.record.store import Attempt
from perilune.control.record.transitions import MachineState
from perilune.control.runs.experiments import Control, StagePlan, advance
from perilune.control.runs.progress import StageEvent, StageFinished
from perilune.control.runs.templates import ResourcesChange, Template
from perilune.errors import RequestError
from perilune.execution.claim import Claim, read_claim
from perilune.execution.observation import Observation
from perilune.execution.placements.gang import combine_observations
from perilune.execution.processes import Presence
from perilune.execution.providers.fake.client import FakeCloud
from perilune.execution.providers.fake.weather import Fault
from perilune.execution.ranks import find_interface_variables
from perilune.execution.verdict import Verdict
from perilune.files import read_json, read_json_lines, sha256_file
from perilune.recipe.load import bundled_recipe, load_recipe
from perilune.recipe.schema import build_job

pytestmark = pytest.mark.slow

NODES = 2


def template(folder: Path, nodes: int = NODES) -> Template:
    return rented_template(folder / "python").model_copy(update={"resources": ResourcesChange(nodes=nodes)})


def gang_job(**spec: object) -> Job:
    return drill_job(**spec).model_copy(update={"task": "gang_drill"})  # type: ignore[arg-type]


def rl_job(folder: Path) -> Job:
    """RL of about one second; the reward for short answers varies even with an untrained model."""
    script = folder / "brevity.py"
    script.write_text(
        "def brevity(completions):\n    return [-len(one[0]['content']) for one in completions]\n"
    )
    overrides = [
        f"rewards={{brevity: {{function: '{script}:brevity'}}}}",
        "model.preset=tiny", "stages.rl.checkpoint=model", "stages.rl.steps=2", "stages.rl.prompts=4",
        "stages.rl.samples=4", "stages.rl.max_tokens=40", "resources.device=cpu", "resources.threads=1",
    ]  # fmt: skip
    recipe = load_recipe(bundled_recipe("quickstart"), overrides)
    return build_job(recipe, recipe.stage("rl"))


@pytest.fixture(autouse=True)
def compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fake machines use the compiled kernels of this machine."""
    if "XDG_CACHE_HOME" not in os.environ:
        monkeypatch.setenv("XDG_CACHE_HOME", str(Path.home() / ".cache"))


class Drill:
    """A run of the gang drill on two machines of the fake cloud."""

    def __init__(self, control: Control, folder: Path, **spec: object) -> None:
        self.control = control
        self.fleet = control.reconciler.rentals.fleet
        where = template(folder)
        plan = StagePlan("drill", where.apply_resources(gang_job(**spec)))
        self.events = advance(control, begin(control, [plan]), [plan], template=where, poll=0.05)
        self.seen: list[StageEvent] = [next(self.events)]
        self.run_id = only_run(control).id

    def until(self, state: str, number: int = 1) -> Attempt:
        """Reconcile until an attempt is in a state."""
        deadline = time.monotonic() + PATIENCE
        while len(found := attempts(self.control)) < number or found[number - 1].state != state:
            assert time.monotonic() < deadline, [(row.number, row.state, row.message) for row in found]
            self.control.reconciler.reconcile_all()
            time.sleep(0.05)
        return found[number - 1]

    def finish(self) -> StageFinished:
        last = list(self.events)[-1]
        assert isinstance(last, StageFinished), last
        return last

    def all_gone(self, cloud: FakeCloud) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.fleet.machines():
            assert time.monotonic() < deadline, [(row.key, row.state) for row in self.fleet.machines()]
            self.control.reconciler.reconcile_all(act=False)
            time.sleep(0.05)
        assert not bill(cloud)["alive"]
        assert all(attempt.cleanup == "done" for attempt in attempts(self.control))


def test_two_machines_start_connect_and_finish_together(
    control: Control, fleet: Fleet, cloud: FakeCloud, tmp_path: Path
) -> None:
    cloud.inject(call="create", fault=Fault.LOST_ANSWER, times=1)
    drill = Drill(control, tmp_path, steps=3, say="hello")
    assert drill.finish().summary["total"] == 12
    run = only_run(control)
    directory = control.directory(run)
    assert verify(directory, run.bundle_digest) == []
    assert [(row.epoch, row.rank) for row in fleet.machines(include_gone=True)] == [(1, 0), (1, 1)]
    assert "hello" in (directory / "artifacts" / "task.log").read_text()
    beside = directory / "runtime" / "node-1" / "runtime"
    assert "hello" in (beside / "process-1" / "runtime.log").read_text()
    assert read_json(beside / "result.json")["exit_code"] == 0
    assert not (beside.parent / "artifacts").exists()
    drill.all_gone(cloud)
    assert len(bill(cloud)["costs"]) == NODES


def test_attempt_gets_all_machines_or_none(
    control: Control, fleet: Fleet, cloud: FakeCloud, tmp_path: Path
) -> None:
    home = control.home.root / "providers.yaml"
    enough = home.read_text()
    home.write_text(enough.replace("daily_cap: 100.0", "daily_cap: 0.1"))  # enough for one
    drill = Drill(control, tmp_path, steps=1)
    drill.control.reconciler.reconcile_all()
    assert "daily cap" in drill.until("planned").message
    assert not fleet.machines(include_gone=True)
    home.write_text(enough)
    cloud.inject(call="create", fault=Fault.ERROR_BEFORE, times=10**6)
    drill.until("provisioning")
    assert [machine.rank for machine in fleet.machines()] == [0, 1]
    assert any("machine 1 of 2 is requested" in fact for fact in explain_run(control, drill.run_id).because)
    cloud.inject(call="create", fault=Fault.ERROR_BEFORE, times=0)
    control.reconciler.rentals.fleet.request_termination(
        fleet.machine_key(drill.run_id, 1, rank=1), "a user wanted it"
    )
    drill.until("failed")
    drill.finish()
    assert [attempt.state for attempt in attempts(drill.control)] == ["failed", "succeeded"]
    drill.all_gone(cloud)


@pytest.mark.thorough
@pytest.mark.parametrize("whom", ["task", "worker", "machine"])
def test_failure_of_one_machine_ends_attempt_and_next_attempt_resumes(
    whom: str, control: Control, fleet: Fleet, cloud: FakeCloud, tmp_path: Path
) -> None:
    how = "kill" if whom == "task" else "hang"
    drill = Drill(control, tmp_path, steps=4, fail_at=2, fail_rank=1, how=how, fresh_only=True)
    first = control.home.attempt(drill.run_id, 1)
    if whom != "task":
        drill.until("running")
        wait_for_second_checkpoint(control)
    if whom == "machine":
        cloud.inject(key=fleet.machine_key(drill.run_id, 1, rank=1), fault=Fault.HOST_DEATH)
    elif whom == "worker":
        claim = read_claim(first / "runtime" / "node-1" / "runtime")
        assert claim is not None
        os.kill(claim.pid, signal.SIGKILL)
    assert drill.finish().summary["began_at"] == 2
    ended, second = attempts(drill.control)
    assert second.state == "succeeded"
    causes = {"task": "killed", "worker": "runner_died", "machine": "machine_lost"}
    assert ended.cause == causes[whom]
    if whom == "task":
        assert "machine 1 of 2: process 1 of 2" in ended.message
    drill.all_gone(cloud)


@pytest.mark.thorough
def test_two_machines_train_the_same_weights_as_one_process(
    control: Control, fleet: Fleet, cloud: FakeCloud, tmp_path: Path
) -> None:
    """Real RL with torch on both machines, connected over TCP."""
    where = template(tmp_path)
    weights = []
    for variant in (where, where.model_copy(update={"resources": ResourcesChange()})):
        plan = StagePlan("rl", variant.apply_resources(rl_job(tmp_path)))
        assert plan.job.resources.nodes == (variant.resources.nodes or 1)
        last = list(advance(control, begin(control, [plan]), [plan], template=variant, poll=0.2))[-1]
        assert isinstance(last, StageFinished), last
        directory = control.directory(control.run(last.run_id))
        assert all(row["grad_norm"] > 0 for row in read_json_lines(directory / "artifacts" / "metrics.jsonl"))
        weights.append(sha256_file(directory / "artifacts" / "checkpoints" / "final" / "model.safetensors"))
    assert weights[0] == weights[1]
    assert [machine.rank for machine in fleet.machines(include_gone=True)] == [0, 1, 0]
    log = (control.home.root / "runs").glob("*/attempts/1/runtime/node-1/runtime/process-1/runtime.log")
    assert "process 1 of 2" in next(log).read_text()


def test_attempt_cleanup_is_done_when_its_last_machine_is_gone(
    control: Control, fleet: Fleet, cloud: FakeCloud
) -> None:
    attempt = an_attempt(control)
    with control.store.transaction() as session:
        keys = [machine.key for machine in fleet.rent(session, attempt, SMALL, 0.4, nodes=NODES)]
    for key in keys:
        tend_until(fleet, key, MachineState.READY)
    end(control, collected=False)
    for key, cleanup in zip(reversed(keys), ("pending", "done"), strict=True):
        cloud.inject(key=key, fault=Fault.HOST_DEATH)
        tend_until(fleet, key, MachineState.GONE)
        with control.store.snapshot() as session:
            assert session.get_one(Attempt, ("01RUN", 1)).cleanup == cleanup


def test_placement_with_one_machine_refuses_job_for_two(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the job needs 2 machines"):
        Template(resources=ResourcesChange(nodes=2)).apply_resources(gang_job())
    alone = template(tmp_path, nodes=2).apply_resources(drill_job())  # the task cannot use two
    assert alone.resources.nodes == 1


def test_interface_to_names_the_interface_that_reaches_a_host() -> None:
    assert find_interface_variables("127.0.0.1")["GLOO_SOCKET_IFNAME"] == "lo"
    with pytest.raises(RequestError, match="cannot be reached"):
        find_interface_variables("no.such.host.invalid")
    with socket.create_server(("127.0.0.1", 0)) as server:  # the system assigns none of the gang's ports
        assert server.getsockname()[1] not in RENDEZVOUS_PORTS


CLAIM = Claim(1, "host", "boot", 7, 9, "n")


def observations() -> st.SearchStrategy[Observation]:
    def seen(cause: str | None, alive: Presence, claimed: bool, unseen: bool) -> Observation:
        if unseen:
            return Observation(unseen="cut")
        if not claimed:
            return Observation()
        if cause is None:
            return Observation(CLAIM, alive)
        good = cause == ""
        return Observation(
            CLAIM, Presence.ABSENT, Verdict(1, 0 if good else 1, None, cause, "", "d" if good else None, 1.0)
        )

    causes = st.sampled_from([None, "", "crashed", "killed", "process_lost"])
    return st.builds(seen, causes, st.sampled_from(Presence), st.booleans(), st.booleans())


@given(st.lists(observations(), min_size=2, max_size=5))
def test_together_combines_observations_of_several_machines(several: list[Observation]) -> None:
    seen = combine_observations(several)
    verdicts = [part.verdict for part in several if part.verdict is not None]
    died = any(part.claim and not part.verdict and part.worker is Presence.ABSENT for part in several)
    fell = any(not part.succeeded and part.cause != "process_lost" for part in verdicts)
    if any(part.unseen for part in several):
        assert seen.unseen and seen.verdict is None  # one unseen machine makes the whole unseen
    elif died or fell:  # whatever the state of the others
        assert seen.worker is Presence.ABSENT and (seen.verdict is None or not seen.verdict.succeeded)
    elif seen.verdict is not None and seen.verdict.succeeded:
        assert len(verdicts) == len(several) and all(part.succeeded for part in verdicts)
    elif seen.verdict is not None:
        own = {part.cause for part in verdicts if not part.succeeded} - {"process_lost"}
        assert seen.verdict.cause in (own or {"process_lost"})  # the first failure, not its consequences
    elif seen.claim is None:
        assert any(part.claim is None for part in several)
    elif seen.worker is Presence.ABSENT:
        assert any(part.worker is Presence.ABSENT and part.verdict is None for part in several)
    elif seen.worker is Presence.PRESENT:
        alive = [part.worker is Presence.PRESENT for part in several if part.verdict is None]
        assert all(alive) and alive
