"""The learning rate of a recipe that states none: by where the model comes from, with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from task_cases import DIGITS, DUEL, make_job, metrics, run_task

from perilune.bundle.plugin import load_plugin, plugin_names
from perilune.learn.learning_rates import DEFAULTS
from perilune.learn.training_settings import OptimizerSettings
from perilune.models.adapters.files import save_policy
from perilune.models.checkpoints.loading import new_model
from perilune.models.text.tokenizer import Tokenizer
from perilune.recipe.load import load_recipe
from perilune.recipe.schema import job_for

RECIPE = """\
name: one
model: {preset: tiny}
environment: {id: reasoning_gym, task: basic_arithmetic}
stages: [{name: rl, task: rl, checkpoint: model}]
"""
LEARNERS = [name for name in plugin_names() if issubclass(load_plugin(name).spec, OptimizerSettings)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder: how it came to be cannot be seen."""
    path = tmp_path_factory.mktemp("model") / "m"
    save_policy(path, new_model("tiny", Tokenizer.characters(), seed=0), Tokenizer.characters())
    return path


def test_every_task_that_learns_has_a_default() -> None:
    assert sorted(DEFAULTS) == LEARNERS


@pytest.mark.parametrize("task", LEARNERS)
def test_the_plan_says_the_rate_and_why(task: str, folder: Path) -> None:
    def line(**options) -> str:
        environment = DUEL if task == "selfplay" else DIGITS
        plan = load_plugin(task).plan(make_job(task, environment=environment, **options))
        return plan["learning rate"]

    pretrained = {"path": str(folder)}
    made_here = line(lr=None)
    assert f"{DEFAULTS[task].fresh:g} after" in made_here
    assert made_here.endswith("the default for a new model (preset tiny)")
    assert f"{DEFAULTS[task].pretrained:g} after" in line(lr=None, model=pretrained)
    assert line(lr=None, model=pretrained).endswith("the default for a pretrained model")
    stated = line(lr=0.0123, model=pretrained)
    assert "0.0123 after" in stated and "default" not in stated
    if "lora" in load_plugin(task).spec.model_fields:
        adapter = line(lr=None, model=pretrained, lora={"rank": 2})
        assert f"{10 * DEFAULTS[task].pretrained:g} after" in adapter
        assert adapter.endswith("the default for an adapter of a pretrained model")


def test_the_bundle_holds_the_number(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "r.yaml")
    job = job_for(recipe, recipe.stage("rl"))
    assert recipe.stage("rl").spec["lr"] is None and job.spec["lr"] == DEFAULTS["rl"].fresh


def test_the_run_uses_it_and_logs_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bundle = run_task(tmp_path / "b", "rl", lr=None, steps=3, warmup=2)
    assert [line["lr"] for line in metrics(bundle)] == [1e-4, 2e-4, 2e-4]
    logged = capfd.readouterr().out
    assert "learning rate: 0.0002 after 2 steps, then constant; the default for a new model" in logged
