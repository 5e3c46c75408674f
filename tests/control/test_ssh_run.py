"""A recipe on a machine behind a real sshd, by the template that the documentation shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from drill_cases import Command, only_run
from hosts_cases import interpreter
from sshd_cases import Line, Sshd, make_key, sshd

from perilune.bundle.verify import verify
from perilune.control.queries.lookup import attempts_of
from perilune.control.runs.experiments import Control

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
    """templates/lab.yaml as the page shows it, with this machine's own address, keys and folders."""
    block = re.search(r'```yaml title="[^"]*/lab.yaml"\n(.*?)```', PAGE.read_text(), re.DOTALL)
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


def test_a_recipe_runs_on_a_box_and_its_evidence_comes_home(
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
    (attempt,) = attempts_of(control, run.id)
    assert (attempt.placement, attempt.state, attempt.cleanup) == ("ssh:127.0.0.1", "succeeded", "done")
    assert verify(control.directory(run), run.bundle_digest) == []
    assert not list((tmp_path / "box" / "workspace").glob("*/1"))  # nothing is left there but what fences
    code, out, _ = perilune("run", str(recipe), "--template", "lab", "--with", "limits.max_lifetime=1")
    assert code == 2

    make_key(server.folder / "host_key")  # the machine is another one now
    server.stop()
    server.start()
    code, _, err = perilune("run", str(recipe), "--template", "lab", "--seed", "4")
    assert code == 2 and "host key" in err and "ssh-keygen -lf" in err
    line.close()
