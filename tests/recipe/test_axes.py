"""Sweep axes: parsing the options, and the arms that they expand to."""

import math
import random

import pytest

from perilune.errors import RequestError
from perilune.recipe.axes import grid_arms, parse_axes, parse_axis, parse_seeds, sample_arms
from perilune.recipe.source import parse_yaml


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("rl.lr=1e-5,3e-5", ("1e-05", "3e-05")),
        ("rl.samples=4, 8", ("4", "8")),
        ("rl.algorithm=grpo,dr_grpo", ("grpo", "dr_grpo")),
        ('rl.system="a, b",c', ("a, b", "c")),
        ("rl.mask=true,false,null", ("true", "false", "null")),
        ("name='1',1", ('"1"', "1")),
        ("rl.algorithm={name: grpo, scale: 1},gspo", ('{"name": "grpo", "scale": 1}', "gspo")),
        ("rl.lr=1e-5,0.00001", ("1e-05",)),  # the same value
    ],
)
def test_parse_axis_values_round_trip_through_yaml(option: str, values: tuple[str, ...]) -> None:
    axis = parse_axis(option)
    assert axis.values == values and axis.bounds is None
    written = parse_yaml(f"[{option.partition('=')[2]}]", "").value
    distinct = [value for index, value in enumerate(written) if value not in written[:index]]
    assert [parse_yaml(value, "").value for value in values] == distinct


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("rl.lr", "is not KEY=VALUES"),
        ("=1,2", "is not KEY=VALUES"),
        ("rl.lr=", "has no value"),
        ("rl.lr=[1", "not valid YAML"),
        ("rl.lr=1e-4..1e-5", "the range is empty"),
        ("seed=1,2", "seeds are not an axis"),
    ],
)
def test_parse_axis_error_names_the_option(option: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        parse_axis(option)
    assert caught.value.where == f"--set {option}"


def test_two_options_for_one_key_are_refused() -> None:
    with pytest.raises(RequestError, match=r"two options set rl\.lr"):
        parse_axes(["rl.lr=1e-5", "rl.samples=4,8", "rl.lr = 1e-4"])
    assert [axis.key for axis in parse_axes(["rl.lr=1e-5", "rl.samples=4,8"])] == ["rl.lr", "rl.samples"]


def test_grid_lists_every_combination_in_order() -> None:
    axes = [parse_axis("rl.lr=1e-5,3e-5"), parse_axis("rl.samples=4,8")]
    assert grid_arms(axes) == [
        ("rl.lr=1e-05", "rl.samples=4"),
        ("rl.lr=1e-05", "rl.samples=8"),
        ("rl.lr=3e-05", "rl.samples=4"),
        ("rl.lr=3e-05", "rl.samples=8"),
    ]
    assert grid_arms([]) == [()]
    with pytest.raises(RequestError, match=r"rl\.lr has a range") as caught:
        grid_arms([parse_axis("rl.lr=1e-6..1e-4")])
    assert "--random" in caught.value.remedy


def test_draw_is_log_uniform_and_longer_draws_share_a_prefix() -> None:
    axes = [parse_axis("rl.lr=1e-6..1e-4"), parse_axis("rl.steps=5..9"), parse_axis("rl.algorithm=grpo,gspo")]
    arms = sample_arms(axes, 400)
    assert sample_arms(axes, 10) == arms[:10]
    assert sample_arms(axes, 10, seed=1) != arms[:10]
    rates = [float(lr.partition("=")[2]) for lr, _, _ in arms]
    assert min(rates) >= 1e-6 and max(rates) <= 1e-4
    below = sum(rate < 1e-5 for rate in rates) / len(rates)  # half of them: 1e-5 is the middle on a log scale
    assert abs(below - 0.5) < 5 * math.sqrt(0.25 / len(rates))
    assert {arm[1] for arm in arms} == {f"rl.steps={count}" for count in range(5, 10)}
    assert {arm[2] for arm in arms} == {"rl.algorithm=grpo", "rl.algorithm=gspo"}


def test_range_from_zero_is_drawn_uniformly() -> None:
    axis, rng = parse_axis("rl.kl=0.0..0.2"), random.Random(0)
    values = [float(axis.draw(rng)) for _ in range(400)]
    below = sum(value < 0.1 for value in values) / len(values)
    assert min(values) >= 0 and max(values) <= 0.2
    assert abs(below - 0.5) < 5 * math.sqrt(0.25 / len(values))


def test_parse_seeds_takes_a_count_a_range_or_a_list() -> None:
    assert parse_seeds("3", 7) == (7, 8, 9)
    assert parse_seeds("3..5", 0) == (3, 4, 5)
    assert parse_seeds("0, 4,7,4", 0) == (0, 4, 7)
    for wrong in ("0", "", "a", "-1", "5..3"):
        with pytest.raises(RequestError, match="neither a number of seeds nor a list"):
            parse_seeds(wrong, 0)
    for count in ("1001", "1..1001", "1000000000000"):
        with pytest.raises(RequestError, match="more than 1,000 seeds"):
            parse_seeds(count, 0)
