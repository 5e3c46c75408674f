"""The comparison of algorithms: its statistics, its text, its charts, and the recipes of its arms."""

import json
import re
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hub_model import put_in_home

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))

from benchmarks.algorithms import FOLDER, SUITES, Setting, read_suite, with_best_rate  # noqa: E402
from benchmarks.comparison.view import SMOLLM2, WINDOW, rate_at, view  # noqa: E402

from perilune.recipe.load import load_recipe  # noqa: E402

SETTINGS = {name: setting for suite in SUITES for name, setting in read_suite(suite).items()}
RATES = SETTINGS["sums"]["rates"]


def record(arm: str, seed: int, rate: float, seconds: float, length: float = 20.0) -> dict[str, Any]:
    """Record of an arm whose pass rate changes linearly from 0.2 over forty steps."""
    steps = 40
    return {
        "setting": "toy",
        "arm": arm,
        "seed": seed,
        "before": {"pass@1": {"mean": 0.2, "low": 0.1, "high": 0.3}, "length": 10.0},
        **{name: {"mean": rate, "low": rate, "high": rate} for name in ("pass@1", "pass@8", "greedy")},
        "length": length,
        "seconds": 2 * seconds,
        "correct": "".join(str(round(8 * rate) if index % 2 else 4) for index in range(64)),
        "curve": {
            "episodes": [256] * steps,
            "processor": list(accumulate([seconds / steps] * steps)),
            "pass_rate": [0.2 + (rate - 0.2) * (step + 1) / steps for step in range(steps)],
        },
    }


def page_of(**arms: list[tuple[float, ...]]) -> dict[str, Any]:
    """The page for arms given as (pass@1, CPU seconds), and optionally tokens per answer, for each seed."""
    return view({
        "command": "python benchmarks/algorithms.py",
        "settings": {"toy": {"title": "A toy", "arms": dict.fromkeys(arms)}},
        "records": [
            record(arm, seed, *figures) for arm, runs in arms.items() for seed, figures in enumerate(runs)
        ],
    })  # fmt: skip


def test_view_separates_differences_from_noise() -> None:
    base = [(0.70, 10.0), (0.72, 10.0), (0.71, 10.0)]
    page = page_of(
        grpo=base,
        better=[
            (rate + 0.10 + jitter, 10.0) for (rate, _), jitter in zip(base, (0, 0.001, 0.002), strict=True)
        ],
        noise=[(0.76, 10.0), (0.68, 10.0), (0.73, 10.0)],
        leans=[(0.75, 10.0), (0.73, 10.0), (0.73, 10.0)],
    )
    assert "`better` against `grpo` at equal episodes: higher (+10.1 points" in page["findings"]
    assert "No difference from `grpo` shown at equal episodes: `noise`, `leans`." in page["findings"]
    compared, found = page["lead"]
    assert compared.startswith("RL with 3 algorithms and variants is compared with GRPO")
    assert "after the same number of episodes, higher with `better`;" in found


def test_view_makes_no_claim_from_two_seeds() -> None:
    page = page_of(grpo=[(0.70, 10.0), (0.72, 10.0)], other=[(0.80, 10.0), (0.8201, 10.0)])
    assert "`other` against `grpo` at equal episodes: too few seeds for a claim" in page["findings"]


def test_slow_arm_is_compared_at_equal_seconds() -> None:
    page = page_of(grpo=[(0.7, 10.0)] * 3, slow=[(0.7, 20.0)] * 3)
    (row,) = page["A toy"]["against grpo at equal seconds"]
    assert float(row["by seed"].split(",")[0]) == pytest.approx(-25, abs=1)  # halfway from 20% to 70%
    (row,) = page["A toy"]["against grpo at equal episodes"]
    assert row["difference, points"] == "+0.0" and row["by seed"] == "+0.0, +0.0, +0.0"


def test_equal_seconds_ignore_load_of_the_machine() -> None:
    page = page_of(grpo=[(0.7, 10.0)] * 3, disturbed=[(0.7, 14.0), (0.7, 10.0), (0.7, 25.0)])
    (row,) = page["A toy"]["against grpo at equal seconds"]
    assert row["difference, points"] == "+0.0"


def test_change_of_tokens_per_answer_is_tested_over_seeds() -> None:
    base = [(0.7, 10.0, 20.0)] * 3
    page = page_of(grpo=base, toggle=[(0.7, 10.0, length) for length in (18.0, 24.0, 12.0)])
    assert "Tokens per answer of `toggle` against `grpo`: no difference shown (-10.0%" in page["findings"]
    page = page_of(grpo=base, toggle=[(0.7, 10.0, length) for length in (18.0, 18.1, 17.9)])
    assert "Tokens per answer of `toggle` against `grpo`: lower (-10.0%" in page["findings"]


def test_rate_at_weights_steps_by_episodes() -> None:
    curve = {"seconds": [1.0, 2.0, 3.0], "episodes": [100, 300, 100], "pass_rate": [0.0, 1.0, 0.0]}
    assert rate_at(curve, 2.5) == 0.75
    assert rate_at(curve, 9.0) == 0.6
    assert WINDOW >= 3


def test_view_corrects_all_comparisons_together() -> None:
    """An arm that is significant alone is not significant among many comparisons."""
    jitter = (0.0, 0.012, 0.024)
    base = [(0.70, 10.0)] * 3
    arm = [(0.75 + shift, 10.0) for shift in jitter]
    flat = [(0.70 + shift, 10.0) for shift in (0.01, -0.01, 0.0)]
    assert "`arm` against `grpo` at equal episodes: higher" in page_of(grpo=base, arm=arm)["findings"]
    others = {f"other{n}": flat for n in range(9)}
    page = page_of(grpo=base, arm=arm, **others)
    assert "No difference from `grpo` shown at equal episodes: `arm`, `other0`" in page["findings"]


def test_view_reports_and_excludes_stopped_runs() -> None:
    records = [record(arm, seed, 0.7, 10.0) for arm in ("grpo", "frail") for seed in range(3)]
    records[-1] = {"setting": "toy", "arm": "frail", "seed": 2, "failed": "the run ended with 1"}
    page = view({
        "command": "",
        "settings": {"toy": {"title": "A toy", "arms": {"grpo": {}, "frail": {}}}},
        "records": records,
    })  # fmt: skip
    assert "`frail` was stopped by a check with seed 2." in page["findings"]
    (row,) = page["A toy"]["against grpo at equal episodes"]
    assert len(row["by seed"].split(",")) == 2


def test_charts_stay_inside_their_panels() -> None:
    (chart,) = page_of(grpo=[(0.7, 10.0)] * 2, other=[(0.8, 30.0)] * 2)["charts"].values()
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


def test_with_best_rate_selects_the_best_learning_rate() -> None:
    tried = {f"{rate:g}": 0.9 - abs(rate - 4e-4) for rate in RATES}
    keys = with_best_rate(Setting("toy", FOLDER, {"grpo": {"algorithm": "grpo"}}, RATES), {"grpo": tried})
    assert keys == {"grpo": {"algorithm": "grpo", "lr": 4e-4}}
    with pytest.raises(SystemExit, match=r"for dapo: run with --tune first"):
        with_best_rate(Setting("toy", FOLDER, {"dapo": {}}, RATES), {"grpo": tried, "dapo": {"0.0001": 0.5}})


@pytest.mark.parametrize(
    ("setting", "arm"), [(name, arm) for name, setting in SETTINGS.items() for arm in setting["arms"]]
)
def test_every_arm_is_a_valid_recipe(
    setting: str, arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_home(tmp_path, "smollm2-135m")
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path))
    keys = SETTINGS[setting]["arms"][arm]
    overrides = [f"rl.{name}={json.dumps(value)}" for name, value in keys.items()]
    recipe = load_recipe(FOLDER / SETTINGS[setting]["recipe"], overrides)
    names = [stage.name for stage in recipe.stages]
    assert names in (["traces", "sft", "after_sft", "rl", "after_rl"], ["before", "rl", "after_rl"])


def test_page_names_the_arms_whose_best_rate_is_at_the_edge_of_the_grid() -> None:
    document = json.loads((FOLDER.parent / "results" / f"{SMOLLM2.name}.json").read_text())
    (rates,) = document["learning_rates"].values()
    best = {arm: max(tried, key=tried.__getitem__) for arm, tried in rates.items()}
    edges = {end(float(rate) for rate in rates["grpo"]) for end in (min, max)}
    assert {arm for arm, rate in best.items() if float(rate) in edges} == set(
        re.findall("`([a-z]+)`", SMOLLM2.edges)
    )
    assert len(rates) == 8
