"""The command `perilune bundle`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perilune.bundle.digest import recorded_digest
from perilune.bundle.inspection import read_job
from perilune.bundle.verify import verify
from perilune.cli.inspect.bundle import MAX_LISTED_DIFFERENCES, app
from perilune.errors import RequestError
from perilune.recipe.load import bundled_recipe, load_recipe

RECIPE = bundled_recipe("quickstart")


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_verify_prints_digest_of_valid_bundle(pristine: Path) -> None:
    assert call("verify", pristine) == (0, f"verified: {recorded_digest(pristine)}\n")


def test_verify_lists_files_that_differ_up_to_a_limit(bundle: Path) -> None:
    (bundle / "job.json").chmod(0o600)
    (bundle / "inputs" / "data").unlink()
    code, output = call("verify", bundle)
    assert code == 1
    mode = "differs: job.json has another mode: expected 0444, found 0600"
    assert output == f"differs: inputs/data is missing\n{mode}\n"
    for number in range(MAX_LISTED_DIFFERENCES):
        (bundle / f"extra-{number:02}").touch()
    lines = call("verify", bundle)[1].splitlines()
    assert len(lines) == MAX_LISTED_DIFFERENCES + 1
    assert lines[-1] == "and 2 more; --json lists all differences"


def test_verify_prints_json(bundle: Path) -> None:
    code, output = call("verify", bundle, "--json")
    assert code == 0 and json.loads(output)["verified"] is True
    (bundle / "job.json").chmod(0o600)
    code, output = call("verify", bundle, "--json")
    assert code == 1
    assert json.loads(output)["differences"] == [
        {"path": "job.json", "kind": "mode", "expected": "0444", "actual": "0600", "place": ""},
    ]


def test_verify_checks_given_digest(pristine: Path) -> None:
    assert call("verify", pristine, "--digest", recorded_digest(pristine))[0] == 0
    assert call("verify", pristine, "--digest", "0" * 64)[0] == 1


def test_verify_rejects_missing_bundle(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="not a bundle"):
        call("verify", tmp_path / "absent")


def test_inspect_prints_text_and_json(pristine: Path) -> None:
    code, output = call("inspect", pristine)
    assert code == 0
    assert "stage warm, task sft, seed 7" in output and "checkpoint: checkpoint, 3 files" in output
    assert json.loads(call("inspect", pristine, "--json")[1])["digest"] == recorded_digest(pristine)


def test_every_command_shows_an_example() -> None:
    for command in ("verify", "inspect", "freeze"):
        assert f"Example: perilune bundle {command} " in call(command, "--help")[1]


def test_freeze_writes_bundle_of_recipe_stage(tmp_path: Path) -> None:
    first = load_recipe(RECIPE).stages[0]
    code, output = call("freeze", RECIPE, "--stage", first.name, "--out", tmp_path / "b", "--json")
    assert code == 0
    assert json.loads(output) == {
        "path": str(tmp_path / "b"),
        "stage": first.name,
        "digest": recorded_digest(tmp_path / "b"),
    }
    assert verify(tmp_path / "b") == []
    assert read_job(tmp_path / "b").spec == first.spec


def consuming_stage() -> tuple[str, dict[str, str]]:
    """Name of a stage that consumes outputs of other stages, and the consumed fields with their stages."""
    for stage in load_recipe(RECIPE).stages:
        consumed = {field: source for field, source in stage.consumes.items() if source != "model"}
        if consumed:
            return stage.name, consumed
    raise AssertionError("no stage of the recipe consumes the output of another stage")


def test_freeze_takes_outputs_of_other_stages_as_inputs(tmp_path: Path) -> None:
    stage, consumed = consuming_stage()
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "rows.jsonl").write_text("{}")
    given = [word for field in consumed for word in ("--input", f"{field}={tmp_path / 'output'}")]
    assert call("freeze", RECIPE, "--stage", stage, "--out", tmp_path / "b", *given)[0] == 0
    assert {item.name for item in read_job(tmp_path / "b").inputs} == set(consumed)
    with pytest.raises(RequestError, match="which data consumes, is missing"):
        call("freeze", RECIPE, "--stage", stage, "--out", tmp_path / "c")
    with pytest.raises(RequestError, match="consumes no such field"):
        call("freeze", RECIPE, "--stage", stage, "--out", tmp_path / "c", "--input", "dta=x")
    assert not (tmp_path / "c").exists()


def test_freeze_lists_stages_when_stage_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no stage 'nope'") as caught:
        call("freeze", RECIPE, "--stage", "nope", "--out", tmp_path / "b")
    assert load_recipe(RECIPE).stages[0].name in caught.value.remedy
