"""A recipe in a container on this machine, with the template from the documentation."""

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from container_cases import SOURCE, docker
from drill_cases import INSTALLED, Command, only_run

from perilune.bundle.verify import verify
from perilune.control.runs.experiments import Control

pytestmark = pytest.mark.xdist_group("sshd")
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "containers.md"
RECIPE = """
name: boxed
seed: 3
environment: {id: reasoning_gym, task: chain_sum, prompt: compact}
model: {preset: tiny}
stages:
  - {name: traces, task: collect, teacher: arithmetic, traces: 20}
"""


def test_recipe_runs_in_container_and_show_names_its_image(
    perilune: Command, control: Control, tmp_path: Path
) -> None:
    block = re.search(r'```yaml title="[^"]*/boxed.yaml"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    assert block is not None
    document = yaml.safe_load(block[1])
    recipe, templates = tmp_path / "boxed.yaml", control.home.root / "templates"
    recipe.write_text(RECIPE)
    templates.mkdir()
    with docker(tmp_path / "docker") as program:
        own = program.container().model_dump(mode="json")
        assert document["launcher"].keys() <= own.keys()
        document["launcher"] |= own
        environment = {"PYTHONPATH": f"{INSTALLED}{os.pathsep}{SOURCE}"}
        document["placement"]["site"] = {
            "installed": True,
            "workspace": str(tmp_path / "workspace"),
            "environment": environment,
        }
        (templates / "boxed.yaml").write_text(yaml.safe_dump(document))
        code, out, err = perilune("run", str(recipe), "--template", "boxed", "--json")
        assert code == 0, err
        assert [stage["state"] for stage in json.loads(out.splitlines()[-1])["stages"]] == ["succeeded"]
        assert program("ps", "--all", "--quiet") == ""
        code, out, _ = perilune("doctor", "--quick", "--json")
        found = {finding["name"]: finding for finding in json.loads(out)["findings"]}
        assert found["containers"]["status"] == "ok" and str(program.path) in found["containers"]["found"]
    run = only_run(control)
    assert verify(control.directory(run), run.bundle_digest) == []
    (attempt,) = json.loads(perilune("show", run.id, "--json")[1])["attempts"]
    assert (attempt["placement"], attempt["launcher"]) == ("local", "docker")
    assert attempt["container"]["image_id"] == program.image
    assert f"image {program.image}" in perilune("show", run.id)[1]
    assert not list((tmp_path / "workspace").glob("*/1"))

    code, out, _ = perilune("doctor", "--quick", "--json")  # its daemon has gone
    found = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    assert found["containers"]["status"] == "advice" and "boxed" in found["containers"]["found"]
