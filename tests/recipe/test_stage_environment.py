"""A stage may override fields of the recipe's environment."""

import pytest

from perilune.errors import RequestError
from perilune.recipe.load import load_recipe
from perilune.recipe.schema import build_job

RECIPE = """name: dishes
model: {{preset: tiny}}
environment: {{id: open_spiel, game: tic_tac_toe, list_moves: false}}
stages:
  - {{name: before, task: evaluate, checkpoint: model}}
  - name: after
    task: evaluate
    checkpoint: model
    environment: {own}
"""


def loaded(tmp_path, own, overrides=()):
    path = tmp_path / "dishes.yaml"
    path.write_text(RECIPE.format(own=own))
    return load_recipe(path, overrides)


def sections(recipe):
    return {stage.name: build_job(recipe, stage).environment for stage in recipe.stages}


def test_stage_environment_overrides_fields_of_the_recipe(tmp_path):
    environments = sections(loaded(tmp_path, "{opponent: mcts, simulations: 7}"))
    assert (environments["before"]["opponent"], environments["after"]["opponent"]) == ("self", "mcts")
    assert environments["after"] == environments["before"] | {"opponent": "mcts", "simulations": 7}
    assert environments["after"]["list_moves"] is False


def test_stage_environment_with_another_id_inherits_no_fields(tmp_path):
    environments = sections(loaded(tmp_path, "{id: calculator, digits: 1}"))
    assert environments["after"]["digits"] == 1 and "game" not in environments["after"]


def test_override_changes_the_environment_of_a_stage(tmp_path):
    recipe = loaded(tmp_path, "{opponent: mcts}", ["after.environment.opponent=random"])
    assert sections(recipe)["after"]["opponent"] == "random"


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("{oponent: mcts}", r"dishes.yaml:9: .*stages.after.environment.oponent.*(?s:.)*'opponent'"),
        ("{opponent: cfr, game: go}", r"dishes.yaml:9: .*stages.after.environment\b"),
        ("mcts", r"dishes.yaml:9: .*stages.after.environment"),
    ],
)
def test_invalid_stage_environment_error_names_the_line(tmp_path, own, message):
    with pytest.raises(RequestError, match=message):
        loaded(tmp_path, own)
