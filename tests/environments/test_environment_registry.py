"""Environments are found by id, by entry point, and by factory."""

import importlib.metadata
from pathlib import Path

import pytest
from environment_cases import gym

from perilune.environments import environment_ids, make_environment
from perilune.environments.adapters.reasoning_gym import ReasoningGymEnvironment, ReasoningGymSpec
from perilune.environments.core import registry
from perilune.environments.core.registry import environment_spec
from perilune.errors import RequestError
from perilune.recipe.evaluation import make_evaluation_recipe


def test_registry_has_reasoning_gym_with_section_model():
    assert "reasoning_gym" in environment_ids()
    model = environment_spec("reasoning_gym")
    assert issubclass(model, ReasoningGymSpec)
    shared = {"context", "episodes", "prompting"}
    assert set(model.model_fields) - set(ReasoningGymSpec.model_fields) == shared
    assert isinstance(make_environment(gym("chain_sum")), ReasoningGymEnvironment)


@pytest.mark.parametrize("section", ["calculator", None, ["calculator"]])
def test_environment_without_section_is_refused(section):
    for make in (make_environment, lambda it: make_evaluation_recipe(Path("model"), it, {}, seed=0)):
        with pytest.raises(RequestError, match="is not a section of keys") as caught:
            make(section)
        assert caught.value.remedy == "{'id': 'calculator'}"


def test_unknown_id_suggests_similar_id():
    with pytest.raises(RequestError, match="no environment called 'reasoning-gym'") as caught:
        make_environment({"id": "reasoning-gym"})
    assert "reasoning_gym" in caught.value.remedy
    with pytest.raises(RequestError) as caught:
        make_environment({"id": "foo"})
    assert caught.value.remedy.startswith("one of: ")  # no id is near
    with pytest.raises(RequestError):
        make_environment({})


class ThirdParty:
    id = "third_party"

    def __init__(self, spec):
        self.spec = spec


def test_registry_loads_environment_from_entry_point(monkeypatch):
    point = importlib.metadata.EntryPoint("third_party", f"{__name__}:ThirdParty", registry.ENVIRONMENT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    registry._list_factories.cache_clear()
    try:
        assert {"reasoning_gym", "third_party"} < set(environment_ids())
        assert environment_spec("third_party") is None
        assert make_environment({"id": "third_party", "size": 3}).spec == {"id": "third_party", "size": 3}
    finally:
        registry._list_factories.cache_clear()


def test_make_environment_loads_factory_by_path():
    environment = make_environment({"id": "factory", "factory": f"{__name__}:ThirdParty"})
    assert environment.id == "third_party"
    for wrong in (None, 3, "", "no_colon", ":f", "no_such_module:f", "json:no_such_function"):
        with pytest.raises(RequestError, match=r"cannot load|needs a factory function"):
            make_environment({"id": "factory", "factory": wrong})
    with pytest.raises(RequestError, match="is a file") as caught:
        make_environment({"id": "factory", "factory": "maze.py:Maze"})
    assert caught.value.remedy.endswith('id: "maze.py:Maze"')


@pytest.mark.parametrize(
    ("episodes", "where"),
    [
        ({"max_turn": 3}, "environment.episodes.max_turn"),
        ({"max_failures": 2}, "environment.episodes.max_failures"),
        ({"on_failure": "shrug"}, "environment.episodes.on_failure"),
        ({"max_tokens": 99}, "environment.episodes.max_tokens"),
    ],
)
def test_episodes_settings_are_checked_for_every_environment(episodes, where):
    for section in (
        {"id": "reasoning_gym", "task": "chain_sum"},
        {"id": "factory", "factory": "builtins:dict"},
    ):
        with pytest.raises(RequestError) as caught:
            make_environment(section | {"episodes": episodes})
        assert caught.value.where == where
    assert "episodes" not in make_environment({"id": "factory", "factory": "builtins:dict", "episodes": {}})
