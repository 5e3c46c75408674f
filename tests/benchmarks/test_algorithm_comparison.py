"""The comparison of algorithms: its statistics, what it says of them, and that every arm is a recipe."""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.comparison.across_seeds import holm, interval, p_value, quantile  # noqa: E402
from benchmarks.comparison.view import WINDOW, rate_at, view  # noqa: E402

from perilune.recipe.load import load_recipe  # noqa: E402

FOLDER = ROOT / "benchmarks" / "comparison"
SETTINGS = yaml.safe_load((FOLDER / "arms.yaml").read_text())


@pytest.mark.parametrize(("degrees", "t"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262)])
def test_quantiles_are_those_of_the_tables(degrees: int, t: float) -> None:
    assert quantile(0.975, degrees) == pytest.approx(t, abs=1e-3)


def test_an_interval_and_its_p_value_agree() -> None:
    differences = [0.01, 0.03, 0.05]
    found = interval(differences)
    assert found["mean"] == pytest.approx(0.03)
    assert found["high"] - found["mean"] == pytest.approx(4.303 * 0.02 / 3**0.5, rel=1e-3)
    assert found["low"] < 0 and p_value(differences) > 0.05
    sure = [0.029, 0.03, 0.031]
    assert interval(sure)["low"] > 0 and p_value(sure) < 0.01


def test_holm_steps_down() -> None:
    corrected = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert corrected == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})


def record(arm: str, seed: int, rate: float, seconds: float, length: float = 20.0) -> dict[str, Any]:
    """An arm whose pass rate climbs in a straight line from 0.2 in forty steps."""
    steps = 40
    return {
        "setting": "toy",
        "arm": arm,
        "seed": seed,
        "before": {"pass@1": {"mean": 0.2, "low": 0.1, "high": 0.3}, "length": 10.0},
        **{name: {"mean": rate, "low": rate, "high": rate} for name in ("pass@1", "pass@8", "greedy")},
        "length": length,
        "seconds": 2 * seconds,
        "correct": "".join(str(round(8 * rate) if place % 2 else 4) for place in range(64)),
        "curve": {
            "episodes": [256] * steps,
            "processor": list(accumulate([seconds / steps] * steps)),
            "pass_rate": [0.2 + (rate - 0.2) * (step + 1) / steps for step in range(steps)],
        },
    }


def shown(**arms: list[tuple[float, float]]) -> dict[str, Any]:
    """The page of arms given as (pass@1, processor seconds) by seed."""
    return view({
        "command": "python benchmarks/algorithms.py",
        "settings": {"toy": {"title": "A toy", "arms": dict.fromkeys(arms)}},
        "records": [
            record(arm, seed, *figures) for arm, runs in arms.items() for seed, figures in enumerate(runs)
        ],
    })  # fmt: skip


def test_a_difference_is_told_from_noise() -> None:
    base = [(0.70, 10.0), (0.72, 10.0), (0.71, 10.0)]
    about = shown(
        grpo=base,
        better=[
            (rate + 0.10 + jitter, 10.0) for (rate, _), jitter in zip(base, (0, 0.001, 0.002), strict=True)
        ],
        noise=[(0.76, 10.0), (0.68, 10.0), (0.73, 10.0)],
        leans=[(0.75, 10.0), (0.73, 10.0), (0.73, 10.0)],
    )["about"]
    assert "`better` against `grpo` at equal episodes: better (+10.1 points" in about
    assert "`noise` against `grpo` at equal episodes: no difference that 3 pairs could show" in about
    assert "`leans` against `grpo` at equal episodes: higher every time, but not clear of noise" in about


def test_nothing_is_said_of_two_seeds() -> None:
    about = shown(grpo=[(0.70, 10.0), (0.72, 10.0)], other=[(0.80, 10.0), (0.8201, 10.0)])["about"]
    assert "`other` against `grpo` at equal episodes: too few seeds to say anything" in about


def test_a_slow_arm_is_read_before_its_end_at_equal_seconds() -> None:
    page = shown(grpo=[(0.7, 10.0)] * 3, slow=[(0.7, 20.0)] * 3)
    (row,) = page["A toy"]["against grpo at equal seconds"]
    assert page["A toy"]["compared at processor seconds"]["seed 0"] == pytest.approx(9.75)
    assert row["seed 0"] == pytest.approx(-0.25, abs=0.01)  # half of the way from 0.2 to 0.7 is missing
    (row,) = page["A toy"]["against grpo at equal episodes"]
    assert row["over seeds"]["mean"] == 0 and row["seed 0"] == {"mean": 0, "low": 0, "high": 0}


def test_a_busy_machine_does_not_make_an_arm_slower() -> None:
    page = shown(grpo=[(0.7, 10.0)] * 3, disturbed=[(0.7, 14.0), (0.7, 10.0), (0.7, 25.0)])
    (row,) = page["A toy"]["against grpo at equal seconds"]
    assert row["over seeds"]["mean"] == pytest.approx(0)


def test_steps_with_more_episodes_weigh_more() -> None:
    curve = {"seconds": [1.0, 2.0, 3.0], "episodes": [100, 300, 100], "pass_rate": [0.0, 1.0, 0.0]}
    assert rate_at(curve, 2.5) == 0.75
    assert rate_at(curve, 9.0) == 0.6
    assert WINDOW >= 3


def test_tasks_with_many_arms_are_joined() -> None:
    settings = {"one": ("grpo", "a", "b"), "two": ("grpo", "a", "b"), "small": ("grpo", "toggle")}
    about = view({
        "command": "",
        "settings": {name: {"title": name, "arms": dict.fromkeys(arms)} for name, arms in settings.items()},
        "records": [
            {**record(arm, seed, 0.7 + 0.1 * (arm == "a") + 0.001 * seed, 10.0), "setting": name}
            for name, arms in settings.items()
            for arm in arms
            for seed in range(2)
        ],
    })["about"]  # fmt: skip
    joined = about[about.index("**Both tasks together**") :]
    assert "`a`: at equal episodes better (+10.0 points" in joined, "four pairs, where each task has two"
    assert "`b`: at equal episodes no difference that 4 pairs could show" in joined
    assert "toggle" not in joined


def test_what_the_checks_stopped_is_said_and_left_out() -> None:
    records = [record(arm, seed, 0.7, 10.0) for arm in ("grpo", "frail") for seed in range(3)]
    records[-1] = {"setting": "toy", "arm": "frail", "seed": 2, "failed": "the run ended with 1"}
    page = view({
        "command": "",
        "settings": {"toy": {"title": "A toy", "arms": {"grpo": {}, "frail": {}}}},
        "records": records,
    })  # fmt: skip
    assert "`frail` did not come to its end with seed 2." in page["about"]
    (row,) = page["A toy"]["against grpo at equal episodes"]
    assert "seed 2" not in row


def test_charts_are_drawn_inside_their_panels() -> None:
    (chart,) = shown(grpo=[(0.7, 10.0)] * 2, other=[(0.8, 30.0)] * 2)["charts"].values()
    root = ElementTree.fromstring(chart)
    width = float(root.get("width", "0"))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "other over grpo" in texts
    lines = [
        node.get("d", "")
        for node in root.iter("{http://www.w3.org/2000/svg}path")
        if "L" in node.get("d", "")
    ]
    assert len(lines) == 4
    for line in lines:
        points = [tuple(map(float, point.split())) for point in line.strip("MZ").split("L")]
        assert all(0 <= x <= width and 0 <= y <= 150 for x, y in points)


@pytest.mark.parametrize(
    ("setting", "arm"), [(name, arm) for name, one in SETTINGS.items() for arm in one["arms"]]
)
def test_every_arm_is_a_recipe(setting: str, arm: str) -> None:
    keys = SETTINGS[setting]["arms"][arm]
    overrides = [f"rl.{name}={json.dumps(value)}" for name, value in keys.items()]
    recipe = load_recipe(FOLDER / SETTINGS[setting]["recipe"], overrides)
    assert [stage.name for stage in recipe.stages] == ["traces", "sft", "after_sft", "rl", "after_rl"]
