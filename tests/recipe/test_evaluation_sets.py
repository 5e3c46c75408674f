"""The sets of a stage's `eval` section are whole environments in a loaded recipe, with their files."""

from pathlib import Path
from typing import Any

import pytest

from perilune.bundle.job import Job
from perilune.errors import RequestError
from perilune.files import get_field
from perilune.recipe.load import load_recipe
from perilune.recipe.schema import build_job
from perilune.recipe.staging import stage_files

RECIPE = """name: pens
model: {{preset: tiny}}
environment: {{id: jsonl, path: pens.jsonl, match: number}}
stages:
  - name: rl
    task: rl
    checkpoint: model
    eval:
      sets: {sets}
"""


def loaded(tmp_path: Path, sets: str) -> Job:
    for name in ("pens", "more"):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(f'{{"prompt": "{n}+1=", "answer": {n + 1}}}\n' for n in range(40))
        )
    (tmp_path / "pens.yaml").write_text(RECIPE.format(sets=sets))
    recipe = load_recipe(tmp_path / "pens.yaml")
    return build_job(recipe, recipe.stages[0])


def sets_of(job: Job) -> dict[str, Any]:
    sets: dict[str, Any] = get_field(job.spec, "eval.sets")
    return sets


def test_evaluation_set_overrides_the_recipe_environment(tmp_path: Path) -> None:
    job = loaded(tmp_path, "{more: {path: more.jsonl}, other: {id: calculator, digits: 1}}")
    sets = sets_of(job)
    assert sets["more"] == job.environment | {"path": str(tmp_path / "more.jsonl")}
    assert (sets["other"]["id"], sets["other"]["digits"]) == ("calculator", 1)
    assert "path" not in sets["other"]


def test_files_of_evaluation_sets_are_frozen_into_the_bundle(tmp_path: Path) -> None:
    job, files = stage_files(loaded(tmp_path, "{more: {path: more.jsonl}}"))
    name = "spec.eval.sets.more.path"
    assert files[name] == tmp_path / "more.jsonl"
    assert sets_of(job)["more"]["path"] == f"inputs/{name}"
    assert {item.name for item in job.inputs if item.kind == "tasks"} == {"environment.path", name}
    moved = job.at(tmp_path / "bundle")
    assert sets_of(moved)["more"]["path"] == str(tmp_path / "bundle" / "inputs" / name)
    assert moved.environment["path"] == str(tmp_path / "bundle" / "inputs" / "environment.path")


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ("{more: {mach: text}}", r"stages.rl.eval.sets.more.mach(?s:.)*'match'"),
        ("{data: {match: text}}", r"data"),
        ("{more: 3}", r"stages.rl.eval.sets.more"),
    ],
)
def test_invalid_evaluation_set_error_names_the_line(tmp_path: Path, sets: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        loaded(tmp_path, sets)
    assert "pens.yaml:9" in str(caught.value)
