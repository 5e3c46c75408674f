"""`restore_optimizer`: stages start with a fresh AdamW by default, and missing state is an error."""

from pathlib import Path

import pytest
from task_cases import DIGITS, DUEL, make_job, run_task

from perilune.bundle.plugin import load_plugin, plugin_names
from perilune.errors import RequestError
from perilune.recipe.load import bundled_recipe, bundled_recipes, load_recipe

ENDS = {**DIGITS, "factory": "task_environments:Ends"}
LEARNERS = [name for name in plugin_names() if "restore_optimizer" in load_plugin(name).spec.model_fields]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Datasets for the tasks that consume `data`."""
    folder = tmp_path_factory.mktemp("data")
    return {
        "sft": run_task(folder / "collect", "collect") / "artifacts" / "traces",
        "preference": run_task(folder / "pairs", "pairs", environment=ENDS) / "artifacts" / "pairs",
    }


@pytest.mark.parametrize("task", LEARNERS)
def test_restore_optimizer_without_saved_state_is_an_error(
    task: str, tmp_path: Path, data: dict[str, Path]
) -> None:
    inputs = {"data": data[task]} if task in data else {}
    with pytest.raises(RequestError, match="has no optimizer state"):
        run_task(
            tmp_path / "b",
            task,
            environment=DUEL if task == "selfplay" else ENDS,
            inputs=inputs,
            restore_optimizer=True,
        )


def test_every_policy_training_task_has_restore_optimizer() -> None:
    assert LEARNERS == ["distill", "flywheel", "preference", "rl", "selfplay", "sft"]
    assert not any(make_job(task).spec["restore_optimizer"] for task in LEARNERS)


def test_bundled_recipes_keep_the_optimizer_that_they_restore() -> None:
    restoring = 0
    for name in (n for n in bundled_recipes() if "/" not in n):  # other recipes need a downloaded model
        recipe = load_recipe(bundled_recipe(name))
        for stage in recipe.stages:
            if stage.spec.get("restore_optimizer"):
                restoring += 1
                assert recipe.stage(stage.spec["checkpoint"]).spec["keep"]["optimizer"], name
    assert restoring
