"""Algorithm and off-policy sections of a recipe: defaults, overrides and error messages."""

from pathlib import Path

import pytest

from perilune.errors import RequestError
from perilune.learn.algorithms import RL_ALGORITHMS, algorithm
from perilune.recipe.load import load_recipe

RECIPE = """\
name: one
model: {preset: tiny}
environment: {id: reasoning_gym, task: basic_arithmetic}
stages:
  - name: rl
    task: rl
    checkpoint: model
    ALGORITHM
"""


def load(path: Path, said: str):
    path.write_text(RECIPE.replace("ALGORITHM", said))
    return load_recipe(path).stage("rl").spec["algorithm"]


@pytest.mark.parametrize("name", list(RL_ALGORITHMS))
def test_bare_algorithm_name_selects_default_options(name: str, tmp_path: Path) -> None:
    assert load(tmp_path / "r.yaml", f"algorithm: {name}") == algorithm(name).model_dump(mode="json")


def test_given_option_overrides_only_its_default(tmp_path: Path) -> None:
    loaded = load(tmp_path / "r.yaml", "algorithm: {name: dr_grpo, clip_high: 0.2}")
    assert loaded == algorithm("dr_grpo", clip_high=0.2).model_dump(mode="json")


@pytest.mark.parametrize(
    ("said", "what", "remedy"),
    [
        ("{name: grpo, clip_hgih: 0.2}", "stages.rl.algorithm.clip_hgih is not a known key", "'clip_high'"),
        ("{name: grpo, clip_low: 2.0}", "stages.rl.algorithm.clip_low is 2.0 but should be less than 1", ""),
        ("{name: grpoo}", "stages.rl.algorithm: no algorithm 'grpoo'", "'grpo'"),
        ("grpoo", "stages.rl.algorithm: no algorithm 'grpoo'", "'grpo'"),
        ("{clip_low: 0.1}", "stages.rl.algorithm.name is missing", ""),
        ("7", "stages.rl.algorithm is 7 but should be a section of keys", ""),
    ],
)
def test_invalid_algorithm_error_has_line_and_remedy(
    said: str, what: str, remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError) as raised:
        load(tmp_path / "r.yaml", f"algorithm: {said}")
    assert what in raised.value.what
    assert raised.value.where.endswith(":8")
    assert raised.value.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("said", "what", "remedy"),
    [
        ("{levle: token}", "stages.rl.off_policy.levle is not a known key", "'level'"),
        ("{weight: truncate}", "weight would correct twice, because the ratio is to the sampler", ""),
        ("{bounds: [2, 1]}", "bounds must be 0 <= lowest < highest", ""),
        ("{proximal: sampelr}", "stages.rl.off_policy.proximal is", ""),
    ],
)
def test_invalid_off_policy_section_error_has_line_and_remedy(
    said: str, what: str, remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError) as raised:
        load(tmp_path / "r.yaml", f"off_policy: {said}")
    assert what in raised.value.what
    assert raised.value.where.endswith(":8")
    assert raised.value.remedy.startswith(remedy)


def test_group_smaller_than_pkpo_needs_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"stages.rl: samples is 8, and pkpo needs at least 10"):
        load(tmp_path / "r.yaml", "algorithm: {name: pkpo, k: 9}")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *(
            (name, "makes rewards negative, and")
            for name in ("maxrl", "pkpo", "pass_at_k_training", "toggle")
        ),
        ("dapo", "makes all rewards of a group differ, and"),
    ],
)
def test_k1_reward_is_rejected_for_algorithms_that_need_unchanged_rewards(
    name: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=f"{why} {name}"):
        load(tmp_path / "r.yaml", f"algorithm: {name}\n    kl: 0.1\n    kl_estimator: k1_reward")


def test_off_policy_settings_are_parsed(tmp_path: Path) -> None:
    text = "off_policy: {proximal: learner, weight: mask, bounds: [0.5, 5], level: sequence-geometric}"
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.replace("ALGORITHM", text))
    spec = load_recipe(path).stage("rl").spec["off_policy"]
    assert (spec["weight"], spec["bounds"], spec["level"]) == ("mask", [0.5, 5.0], "sequence-geometric")
