"""A recipe on a machine behind a real sshd, with the template from the documentation."""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from drill_cases import Command, begin, carry_out, drill_plan, has_event, only_run, wait_for
from hosts_cases import interpreter
from sshd_cases import Line, Sshd, make_key, sshd

from perilune.bundle.verify import verify
from perilune.control.queries.lookup import list_attempts
from perilune.control.runs import reconcile
from perilune.control.runs.experiments import Control, advance
from perilune.control.runs.planner import Retry
from perilune.control.runs.progress import StageFinished
from perilune.control.runs.templates import SshTarget, Template
from perilune.execution import limits
from perilune.execution.claim import CLAIM_VARIABLE, read_claim
from perilune.execution.limits import AttemptLimits
from perilune.execution.placements.protocol import Capabilities
from perilune.execution.placements.remote import RemotePlacement, Site
from perilune.execution.processes import find_marked
from perilune.files import read_json

pytestmark = pytest.mark.xdist_group("sshd")
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "ssh.md"
RECIPE = """
name: far
seed: 3
environment: {id: reasoning_gym, task: chain_sum, prompt: compact}
model: {preset: tiny}
stages:
  - {name: traces, task: collect, teacher: arithmetic, traces: 20}
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    with sshd(tmp_path / "sshd") as running:
        yield running


def write_template(home: Path, server: Sshd, port: int, workspace: Path) -> None:
    """Write templates/lab.yaml from the page with the address, keys and folders of this machine."""
    block = re.search(r'```yaml title="[^"]*/gpu2.yaml"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    assert block is not None
    document = yaml.safe_load(block[1])
    own = server.settings(port).model_dump(exclude_none=True)
    assert document["placement"].keys() <= own.keys() | {"name", "site"}
    document["placement"] |= own
    python = interpreter(workspace.parent / "python")
    document["placement"]["site"] |= {"workspace": str(workspace), "python": str(python), "installed": True}
    document["resources"]["device"] = "cpu"
    (home / "templates").mkdir(exist_ok=True)
    (home / "templates" / "lab.yaml").write_text(yaml.safe_dump(document))


def test_recipe_runs_over_ssh_and_changed_host_key_is_refused(
    perilune: Command, control: Control, server: Sshd, tmp_path: Path
) -> None:
    recipe = tmp_path / "far.yaml"
    recipe.write_text(RECIPE)
    line = Line(server.port)
    write_template(control.home.root, server, line.port, tmp_path / "box" / "workspace")
    code, out, err = perilune("run", str(recipe), "--template", "lab", "--json")
    assert code == 0, err
    assert [stage["state"] for stage in json.loads(out.splitlines()[-1])["stages"]] == ["succeeded"]
    run = only_run(control)
    (attempt,) = list_attempts(control, run.id)
    assert (attempt.placement, attempt.state, attempt.cleanup) == ("ssh:127.0.0.1", "succeeded", "done")
    assert verify(control.directory(run), run.bundle_digest) == []
    assert not list((tmp_path / "box" / "workspace").glob("*/1"))  # only fencing files are left
    code, out, _ = perilune("run", str(recipe), "--template", "lab", "--with", "limits.max_lifetime=1")
    assert code == 2

    make_key(server.folder / "host_key")  # as if another machine had the address
    server.stop()
    server.start()
    code, _, err = perilune("run", str(recipe), "--template", "lab", "--seed", "4")
    assert code == 2 and "host key" in err and "ssh-keygen -lf" in err
    line.close()


def test_lost_attempt_resumes_from_checkpoint_on_its_machine(
    control: Control, server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine fails after writing a checkpoint that was never fetched."""
    monkeypatch.setattr(RemotePlacement, "capabilities", Capabilities(is_remote=True, look_interval_s=0.1))
    monkeypatch.setattr(reconcile, "MAX_PAUSE_S", 0.3)
    monkeypatch.setattr(limits, "STOP_MARGIN_S", 0.2)
    monkeypatch.setattr(limits, "STOP_GRACE_S", 0.2)
    line, workspace = Line(server.port), tmp_path / "box" / "workspace"
    site = Site(
        python=str(interpreter(tmp_path / "box" / "python")), installed=True, workspace=str(workspace)
    )
    there = SshTarget(**server.settings(line.port).model_dump(), site=site)
    bounds = AttemptLimits(on_box_stop_after=4.0)
    template = Template(placement=there, retry=Retry(base=0.01), limits=bounds)
    gate = tmp_path / "gate"
    plan = drill_plan(steps=4, fail_at=2, how="hang", fresh_only=True, gate=str(gate))
    run_id = next(advance(control, begin(control, [plan]), [plan], template=template)).run_id

    def observed_state(number: int = 1) -> str:
        time.sleep(0.2)
        control.reconciler.reset_backoff(run_id)
        control.reconciler.reconcile(run_id)
        attempts = list_attempts(control, run_id)
        return attempts[number - 1].state if len(attempts) >= number else ""

    files = workspace / run_id / "1"
    wait_for(lambda: observed_state() == "running" and has_event(files, "waits"), "a waiting task")
    line.cut()
    gate.touch()
    wait_for(lambda: has_event(files, "hangs"), "two checkpoints")
    claim, keeper = read_claim(files / "runtime"), read_json(workspace / run_id / "claim.1.json")["pid"]
    assert claim is not None
    for pid in (keeper, claim.pid, *(process.pid for process in find_marked(CLAIM_VARIABLE, claim.nonce))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(
        lambda: observed_state(2) == "lost",
        "the loss of that attempt and of the next, which finds no machine",
    )
    assert not list(control.home.attempt(run_id, 1).glob("artifacts/checkpoints/*"))
    line.restore()
    third = control.home.attempt(run_id, 3)
    wait_for(lambda: observed_state(3) == "succeeded" or has_event(third, "hangs"), "the next attempt")
    assert [attempt.state for attempt in list_attempts(control, run_id)] == ["lost", "lost", "succeeded"]
    assert control.summary(control.run(run_id))["began_at"] == 2
    whole = carry_out(control, drill_plan(steps=4), name="uninterrupted")[-1]
    assert isinstance(whole, StageFinished)
    files_of = [read_json(control.directory(control.run(run)) / "artifacts" / "manifest.json")["files"]
                for run in (run_id, whole.run_id)]  # fmt: skip
    for name in ("data/total.json", "metrics.jsonl"):
        assert files_of[0][name] == files_of[1][name], name
    wait_for(
        lambda: not control.reconciler.reconcile_all() and not control.reconciler.unclean_attempts(),
        "the cleanup",
    )
    assert not files.exists()
    line.close()
