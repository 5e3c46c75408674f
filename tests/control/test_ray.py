"""Attempts on a real Ray cluster with two nodes on this machine and its own token."""

import hashlib
import io
import json
import os
import secrets
import shlex
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from cloud_cases import LEASE, hurry
from drill_cases import (
    Command,
    attempts,
    begin,
    drill_bundle,
    drill_job,
    drill_plan,
    only_run,
    wait_for,
    wait_for_progress,
    wait_for_second_checkpoint,
)
from hosts_cases import interpreter
from placement_conformance import PlacementConformance, assigned, home_has, look, stage, until, working
from ray_cases import HEAD, SECOND, LocalRay, local_ray
from task_cases import make_bundle, make_job, run_task

from perilune.bundle.compare import compare_artifacts
from perilune.bundle.verify import verify
from perilune.control.machines.providers import Providers
from perilune.control.runs.experiments import Control, StagePlan, advance
from perilune.control.runs.planner import Retry
from perilune.control.runs.progress import StageFinished
from perilune.control.runs.templates import RentedTarget, ResourcesChange, Template
from perilune.errors import RequestError
from perilune.execution.hosts.protocol import Host, HostRefusedError, HostUnreachableError
from perilune.execution.limits import AttemptLimits
from perilune.execution.placements.protocol import Assignment, Placement
from perilune.execution.placements.remote import RemotePlacement, Site
from perilune.execution.processes import Presence
from perilune.execution.providers.frames import Kind, read_frame, token_proof
from perilune.execution.providers.protocol import (
    MachineRequest,
    MachineStatus,
    ProviderRefusedError,
    ProviderUnreachableError,
    RentedMachine,
)
from perilune.execution.providers.ray.client import RayCluster
from perilune.execution.providers.ray.host import RayHost
from perilune.files import read_json_lines

SAMPLED: dict[str, Any] = {
    "environment": {"id": "calculator"},
    "off_policy": {"proximal": "learner", "weight": "truncate"},
    "steps": 15,
    "save_every": 15,
}

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def ray() -> Iterator[LocalRay]:
    with local_ray() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def provider(ray: LocalRay) -> RayCluster:
    return ray.provider()


def new_key() -> str:
    return f"perilune-drills-{secrets.token_hex(6)}-1-0"


def create_machines(
    provider: RayCluster, kind: str = "small", nodes: int = 1, lifetime: float = 600.0
) -> list[RentedMachine]:
    """Create the machines of a new attempt and wait until they run."""
    key = new_key()
    provider.create(key, MachineRequest(kind, lifetime, nodes))
    tag = key.removesuffix("-0")

    def running() -> list[RentedMachine]:
        machines = list(provider.list(tag))
        assert all(machine.status is not MachineStatus.ENDED for machine in machines), machines
        return machines if all(machine.status is MachineStatus.RUNNING for machine in machines) else []

    machines: list[RentedMachine] = until(running, "the start of the machines")
    return machines


def has_ended(provider: RayCluster, key: str) -> str:
    """Wait for the end of a machine; return the reason."""

    def ended() -> RentedMachine | None:
        seen = provider.find(key).machine
        return seen if seen is not None and seen.status is MachineStatus.ENDED else None

    return str(until(ended, "the end of the machine").reason)


def on(host: Host, folder: Path, workspace: str = "~/.perilune/attempts") -> RemotePlacement:
    site = Site(python=str(interpreter(folder)), installed=True, workspace=workspace)
    return RemotePlacement(host, site, AttemptLimits())


@pytest.fixture(scope="module")
def machine(provider: RayCluster) -> RentedMachine:
    return create_machines(provider)[0]


class TestRay(PlacementConformance):
    @pytest.fixture
    def placement(self, provider: RayCluster, machine: RentedMachine, tmp_path: Path) -> Placement:
        return on(provider.host(machine), tmp_path / "python", str(tmp_path / "a workspace"))


def ask(provider: RayCluster, key: str, *, proven: bool = True, nonce: str = "") -> str:
    """Send a raw command request without a proof or with an old nonce; return the machine's answer."""
    host, _, port = provider.settings.gateway.rpartition(":")
    token = provider._ready[key.removesuffix("-0")].token if proven else ""
    with socket.create_connection((host, int(port)), 10.0) as wire, wire.makefile("rb") as answers:
        wire.sendall(json.dumps({"machine": key, "nonce": "n"}).encode() + b"\n")
        kind, hello = read_frame(answers) or pytest.fail("no answer")
        assert kind is Kind.HELLO
        nonce = nonce or json.loads(hello)["nonce"]
        asked = {"command": ["true"], "nonce": nonce, "proof": token_proof(token, "command", nonce, "true")}
        wire.sendall(json.dumps(asked).encode() + b"\n")
        kind, refusal = read_frame(answers) or pytest.fail("no answer")
        assert kind is Kind.ERRORS
        return refusal.decode().strip().rpartition("PermissionError: ")[2]


def test_host_transfers_command_data_unchanged_and_checks_tokens(
    provider: RayCluster, machine: RentedMachine, ray: LocalRay
) -> None:
    host = provider.host(machine)
    data = secrets.token_bytes(12 << 20)
    with tempfile.TemporaryFile() as back:
        answer = host.run(["tee", "/dev/stderr"], source=io.BytesIO(data), sink=back)
        back.seek(0)
        assert answer.exit_code == 0 and hashlib.sha256(back.read()).digest() == hashlib.sha256(data).digest()
    assert host.run(["true"], source=io.BytesIO(data)).exit_code == 0  # the command does not read it
    assert host.run(["sh", "-c", "echo here; echo there >&2; exit 7"]).output == b"here\n"
    assert host.run(["sh", "-c", "kill -9 $$"]).exit_code == 137
    missing = host.run(["/no/such/program"])
    assert missing.exit_code == 127 and "No such file" in missing.errors
    environment = host.run(["env"]).output.decode()
    assert ray.token not in environment and "RAY_" not in environment and "PERILUNE_HOLDER=" in environment
    assert "PERILUNE_CORES=1.0\n" in environment
    with pytest.raises(HostUnreachableError, match="no end within"):
        host.run(["sleep", "60"], timeout=0.5)
    with pytest.raises(HostRefusedError, match="is not this machine"):
        RayHost(provider.settings.gateway, machine.key, "0" * 64).run(["true"])
    assert ask(provider, machine.key, proven=False) == "the token is wrong"
    assert ask(provider, machine.key, nonce="0" * 32) == "the request was used before"
    with pytest.raises(HostUnreachableError, match="cannot be reached"):
        RayHost(provider.settings.gateway, new_key(), "0" * 64).run(["true"])


def test_machines_of_an_attempt_start_and_end_together_without_leftovers(
    provider: RayCluster, ray: LocalRay, tmp_path: Path
) -> None:
    spread = ray.provider(strategy="STRICT_SPREAD")
    first, second = create_machines(spread, nodes=2)
    again = spread.create(second.key, MachineRequest("small", 600.0, 2))
    assert (again.key, again.status) == (second.key, MachineStatus.RUNNING)
    assert {first.address, second.address} == {HEAD, SECOND}
    assert [(machine.kind, machine.price) for machine in (first, second)] == [("small", 0.4)] * 2
    client = RayCluster(provider.settings)  # a client that did not create them
    assert {machine.key for machine in client.list("perilune-drills-")} >= {first.key, second.key}
    homes = [client.host(machine).run(["pwd"]).output.decode().strip() for machine in (first, second)]
    assert len(set(homes)) == 2 and all(stat.S_IMODE(Path(home).stat().st_mode) == 0o700 for home in homes)

    attempt = assigned(tmp_path)
    placement = on(client.host(second), tmp_path / "python")
    stage(placement, attempt, drill_bundle(tmp_path / "bundle", fail_at=1, how="daemon"))
    placement.start(attempt)
    home_has(placement, attempt, "runtime/daemon.pid")
    assert working(attempt)
    client.terminate(first.key)
    assert has_ended(client, second.key) == "terminated"
    until(lambda: not working(attempt), "the end of the processes there")
    assert client.find(first.key).presence is Presence.PRESENT  # an ended machine stays listed
    client.terminate(first.key)
    client.terminate(new_key())
    assert client.find(new_key()).presence is Presence.ABSENT

    assert Path(homes[0]).exists()
    (short,) = create_machines(provider, "elsewhere", lifetime=6.0)  # the next machine cleans up
    assert not any(Path(home).exists() for home in homes)
    assert has_ended(provider, short.key) == "lifetime"


def test_unavailable_machines_stay_pending_or_are_refused(provider: RayCluster, ray: LocalRay) -> None:
    key = new_key()
    provider.create(key, MachineRequest("huge", 600.0))
    (seen,) = provider.list(key)
    assert seen.status is MachineStatus.PENDING
    provider.terminate(key)
    assert has_ended(provider, key) == "terminated"
    with pytest.raises(ProviderRefusedError, match="no machine of kind 'hug'"):
        provider.create(new_key(), MachineRequest("hug", 600.0))
    with pytest.raises(ProviderRefusedError, match="refuses access"):
        ray.provider(token=None).list("perilune")
    closed = ray.provider(dashboard="http://127.0.0.1:9")
    with pytest.raises(ProviderUnreachableError):
        closed.list("perilune")
    assert closed.find(key).presence is Presence.UNKNOWN
    broken = ray.provider(python="/no/such/python")
    failing = new_key()
    broken.create(failing, MachineRequest("small", 600.0))
    assert has_ended(broken, failing) == "host failure: there is no /no/such/python on the head node"


def test_settings_are_quoted_for_the_job_and_unknown_keys_are_named(ray: LocalRay, control: Control) -> None:
    odd = ray.provider(workspace='~/$(touch /tmp/x) "; `id`', namespace="a b&c", python="/o dd/python")
    parts = shlex.split(odd._entrypoint("perilune-a-b-1", MachineRequest("small", 5.0)))
    assert parts[0] == "/o dd/python" and parts[parts.index("--workspace") + 1] == odd.settings.workspace
    assert json.loads(parts[parts.index("--resources") + 1]) == {"CPU": 1.0}
    file = control.home.root / "providers.yaml"
    file.write_text(
        "daily_cap: 1\nproviders:\n  mine:\n    type: ray\n    kinds: {a: {cpus: 1}}\n    dashbord: x\n"
    )
    with pytest.raises(RequestError) as wrong:
        Providers(control.home).settings()
    assert wrong.value.where == f"{file}:6" and "dashboard" in (wrong.value.remedy or "")


def rents_from(
    control: Control, ray: LocalRay, folder: Path, monkeypatch: pytest.MonkeyPatch, nodes: int | None = None
) -> Template:
    """Let the home rent from the cluster with frequent observations; return a template for it."""
    hurry(monkeypatch)
    settings = ray.settings().model_dump(mode="json")
    providers = {"daily_cap": 100.0, "providers": {"mine": settings}}
    (control.home.root / "providers.yaml").write_text(yaml.safe_dump(providers))
    site = Site(python=str(interpreter(folder / "python")), installed=True)
    return Template(
        bring="all",
        placement=RentedTarget(name="rented", provider="mine", kind="small", lease=LEASE, site=site),
        resources=ResourcesChange(nodes=nodes),
        retry=Retry(base=0.01),
        limits=AttemptLimits(on_box_stop_after=60.0),
    )


def test_attempt_on_two_nodes_is_one_job(
    control: Control, ray: LocalRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = rents_from(control, ray, tmp_path, monkeypatch, nodes=2)
    plan = StagePlan(
        "drill", template.apply_resources(drill_job(steps=2).model_copy(update={"task": "gang_drill"}))
    )
    last = list(advance(control, begin(control, [plan]), [plan], template=template, poll=0.1))[-1]
    assert isinstance(last, StageFinished), last
    run = only_run(control)
    assert verify(control.directory(run), run.bundle_digest) == []
    (job,) = (job for job in ray.provider().jobs.list_jobs() if run.id.lower() in job.name)
    assert job.metadata["perilune.nodes"] == "2"
    until(lambda: not rented_after_pass(control), "the end of every machine")


def rented_after_pass(control: Control) -> list[str]:
    control.reconciler.reconcile_all(act=False)
    return [machine.key for machine in control.reconciler.rentals.fleet.machines()]


def on_nodes(ray: LocalRay, bundle: Path, **changes: object) -> subprocess.Popen[str]:
    """Start a process that trains asynchronously and samples on the nodes of the cluster."""
    ahead = {"staleness": 0, "workers": 2, "ray": {"address": f"{HEAD}:{ray.port}", **changes}}
    make_bundle(bundle, make_job("rl", asynchronous=ahead, **SAMPLED))
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(ray.folder / "token")}
    return subprocess.Popen(
        [sys.executable, "-m", "perilune.execution.task_process", str(bundle), str(os.getpid())],
        env=os.environ | access,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def actors() -> list[psutil.Process]:
    titles = ((proc, "".join(proc.info["cmdline"] or ())) for proc in psutil.process_iter(["cmdline"]))
    return [proc for proc, title in titles if title.startswith("ray::_Actor")]


@pytest.mark.thorough
def test_training_survives_lost_rollout_process(ray: LocalRay, tmp_path: Path) -> None:
    """The checkpoint equals that of synchronous training although one of two rollout processes is killed."""
    process = on_nodes(ray, tmp_path / "ray")
    figures = tmp_path / "ray" / "artifacts" / "metrics.jsonl"
    wait_for(lambda: figures.exists() or process.poll() is not None, "a step")
    sampling = actors()
    assert len(sampling) == 2
    sampling[0].kill()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    timings = list(read_json_lines(tmp_path / "ray" / "artifacts" / "timings.jsonl"))
    assert timings[-1]["rollout_processes_lost"] == 1
    expected = run_task(tmp_path / "synchronous", "rl", **SAMPLED)
    different = [file.path for file in compare_artifacts(expected, tmp_path / "ray")]
    assert not [path for path in different if "/checkpoints/" in path]
    wait_for(lambda: not actors(), "the end of the actors")


@pytest.mark.thorough
def test_too_few_gpus_for_rollout_processes_are_reported(ray: LocalRay, tmp_path: Path) -> None:
    output, _ = on_nodes(ray, tmp_path / "bundle", gpus=1).communicate(timeout=300)
    assert "the Ray cluster has 0 GPUs, and 2 rollout processes need 2" in output


def test_killed_node_ends_its_machines_and_their_processes(
    provider: RayCluster, ray: LocalRay, tmp_path: Path
) -> None:
    (machine,) = create_machines(provider, "elsewhere")
    attempt = assigned(tmp_path)
    placement = on(provider.host(machine), tmp_path / "python")
    stage(placement, attempt, drill_bundle(tmp_path / "bundle", fail_at=1, how="daemon"))
    placement.start(attempt)
    home_has(placement, attempt, "runtime/daemon.pid")
    assert look(placement, attempt).worker is Presence.PRESENT and working(attempt)
    ray.kill(SECOND)
    assert has_ended(provider, machine.key).startswith("host failure")
    until(lambda: not working(attempt), "the end of the processes there")
    assert placement.observe(attempt).unseen


@pytest.mark.thorough
def test_run_resumes_from_fetched_checkpoint_after_head_restart(
    control: Control, ray: LocalRay, perilune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = rents_from(control, ray, tmp_path, monkeypatch)
    plan = drill_plan(steps=4, fail_at=2, how="hang", fresh_only=True)
    events = advance(control, begin(control, [plan]), [plan], template=template, poll=0.1)
    wait_for_progress(events)
    wait_for_second_checkpoint(control)
    run = only_run(control)

    first = Assignment(run.id, 1, control.directory(run))
    assert working(first)
    code, out, _ = perilune("machines", "list", "--json")
    (listed,) = json.loads(out)["machines"]
    assert code == 0 and (listed["provider"], listed["kind"], listed["state"]) == ("mine", "small", "ready")
    for node in (HEAD, SECOND):
        ray.kill(node)
    wait_for(
        lambda: control.reconciler.reconcile_all() or attempts(control)[0].reachability == "unreachable",
        "the unreachable attempt",
    )
    assert [attempt.state for attempt in attempts(control)] == ["running"]  # its state is unknown
    ray.start_head()
    last = list(events)[-1]
    assert isinstance(last, StageFinished) and last.summary["began_at"] == 2
    assert not working(first)  # it ended without a stop request
    assert [(row.state, row.cause) for row in attempts(control)] == [
        ("lost", "machine_lost"),
        ("succeeded", ""),
    ]
    assert verify(control.directory(run), run.bundle_digest) == []
    until(lambda: not rented_after_pass(control), "the end of every machine")
    assert all(machine.status is MachineStatus.ENDED for machine in ray.provider().list("perilune"))
