"""Optuna's proposals: inside the search space, reproducible and stateless."""

import json
import math
import sys
from pathlib import Path

import pytest
from drill_cases import Command

from perilune.control.runs.experiments import Control
from perilune.control.runs.search import propose_arm
from perilune.errors import RequestError
from perilune.recipe.axes import Settings, parse_axis

RECIPE = """
name: one
model: {preset: tiny}
environment: {id: calculator}
resources: {device: cpu, threads: 1}
stages:
  - {name: only, task: drill, steps: 1}
"""


@pytest.fixture
def optuna() -> object:
    return pytest.importorskip("optuna", reason="needs Optuna: pip install optuna")


@pytest.mark.usefixtures("optuna")
def test_search_improves_on_known_curve_and_depends_only_on_arms() -> None:
    axes = [
        parse_axis("rl.lr=1e-6..1e-2"),
        parse_axis("rl.samples=2..16"),
        parse_axis("rl.algorithm=grpo,gspo"),
    ]

    def value(settings: Settings) -> float:
        lr, samples, name = (setting.partition("=")[2] for setting in settings)
        return -abs(math.log10(float(lr)) + 4) - abs(int(samples) - 8) / 8 - (name == "gspo")

    arms: list[Settings] = []
    for _ in range(30):
        proposed = propose_arm(axes, arms, {arm: value(arm) for arm in arms}, maximize=True)
        assert proposed is not None and proposed not in arms
        assert proposed == propose_arm(axes, arms, {arm: value(arm) for arm in arms}, maximize=True)
        arms.append(proposed)
    lr, samples, _ = zip(*(arm for arm in arms), strict=True)
    assert all(1e-6 <= float(setting.partition("=")[2]) <= 1e-2 for setting in lr)
    assert all(2 <= int(setting.partition("=")[2]) <= 16 for setting in samples)
    first, last = ([value(arm) for arm in part] for part in (arms[:5], arms[-5:]))
    assert sum(last) > sum(first)  # the first five are random


@pytest.mark.usefixtures("optuna")
def test_search_ends_when_every_arm_was_tried() -> None:
    axes = [parse_axis("rl.algorithm=grpo,gspo")]
    arms = [("rl.algorithm=grpo",), ("rl.algorithm=gspo",)]
    assert propose_arm(axes, arms, {arms[0]: 1.0}, maximize=False) is None


@pytest.mark.usefixtures("optuna")
def test_sweep_search_stops_at_its_number_of_arms(
    perilune: Command, control: Control, tmp_path: Path
) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(RECIPE)
    command = (
        "sweep",
        str(path),
        "--set",
        "only.steps=1..4",
        "--search",
        "3",
        "--metric",
        "only.total",
        "--json",
    )
    plan = json.loads(perilune(*command, "--plan")[1])
    assert plan["to_run"] == {"only": 3} and len(plan["arms"]) == 1  # the others are not known yet
    code, out, err = perilune(*command)
    document = json.loads(out)
    assert code == 0, err
    steps = [arm["settings"]["only.steps"] for arm in document["arms"]]
    assert len(set(steps)) == 3 and document["best"] == steps.index(max(steps)) + 1
    again = json.loads(perilune(*command)[1])
    assert again["arms"] == document["arms"]  # all arms exist, so none is proposed again


def test_without_optuna_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(RequestError, match="--search needs Optuna") as found:
        propose_arm([parse_axis("rl.lr=1e-6..1e-4")], [], {}, maximize=True)
    assert "perilune[search]" in found.value.remedy
