"""Calibration: rank agreement of prefix values with the pass rates of continuations."""

import numpy as np
import pytest
from pydantic import ValidationError
from task_cases import SUMS, episodes, make_job, metrics, run_task, summary

from perilune.bundle.plugin import load_plugin
from perilune.errors import RequestError
from perilune.tasks.process_rewards.calibration import (
    CalibratedAnswer,
    calibration_summary,
    describe_calibration,
)
from perilune.tasks.process_rewards.stage import CalibrateSpec
from perilune.ui.collect import collect_report
from perilune.ui.view import view_folder

STATED = {"id": "factory", "factory": "process_environments:Stated"}


def answers(noise: float, sign: float = 1.0, tasks: int = 40, played: int = 16) -> list[CalibratedAnswer]:
    """Answers with known prefix values, observed with `noise` and multiplied by `sign`."""
    rng = np.random.default_rng(0)
    made = []
    for task in range(tasks):
        worth = rng.random((2, 4))
        for row in worth:
            values = sign * row + noise * rng.normal(size=4)
            made.append(CalibratedAnswer(f"t{task}", values, (rng.random((4, played)) < row[:, None]) * 1.0))
    return made


def test_accurate_values_reach_the_correlation_ceiling() -> None:
    good, noisy, none, turned = (
        calibration_summary(answers(noise, sign), 0)["differences"]
        for noise, sign in ((0.0, 1.0), (0.5, 1.0), (50.0, 1.0), (0.0, -1.0))
    )
    assert good["count"] == 40 * 2 * 3
    assert good["spearman"]["mean"] == pytest.approx(good["ceiling"], abs=0.05)
    assert 0.2 < noisy["spearman"]["mean"] < good["spearman"]["low"]
    assert none["spearman"]["low"] < 0 < none["spearman"]["high"]
    assert turned["spearman"]["high"] < -0.8


def test_summary_reports_the_standard_error_of_continuations() -> None:
    """K continuations give a standard error of at most 0.5 / sqrt(K) (0.167 for 9)."""
    even = [CalibratedAnswer("t", np.zeros(2), np.array([[0.0, 1.0] * 8] * 2))]
    assert calibration_summary(even, 0)["standard_error"] == pytest.approx(0.5 / 4)
    nine = calibration_summary(answers(0, played=9), 0)
    assert 0 < nine["standard_error"] <= 0.5 / 3
    assert calibration_summary(answers(0, played=2), 0)["values"]["ceiling"] < nine["values"]["ceiling"] < 1


def test_summary_reports_positions_and_reliability_bins() -> None:
    report = calibration_summary(answers(0.0), 0)
    assert [entry["count"] for entry in report["by_place"]] == [80] * 4
    assert all(entry["spearman"] > 0.8 for entry in report["by_place"])
    assert sum(part["count"] for part in report["reliability"]) == 320
    assert [part["value"] for part in report["reliability"]] == sorted(
        part["value"] for part in report["reliability"]
    )
    assert all(abs(part["value"] - part["played"]) < 0.15 for part in report["reliability"])


def test_description_warns_about_untrustworthy_values() -> None:
    summaries = [calibration_summary(answers(0, sign), 0) for sign in (1.0, -1.0)]
    trusted, not_trusted = map(describe_calibration, summaries)
    assert not any("do not train on these" in line for line in trusted)
    assert "do not train on these" in not_trusted[-1]
    single = [CalibratedAnswer("t", np.zeros(1), np.ones((1, 4)))]
    assert "give no correlation" in describe_calibration(calibration_summary(single, 0))[0]
    assert "do not train on these" in describe_calibration(calibration_summary(single, 0))[-1]


def test_calibrate_stage_writes_summary_episodes_and_metrics(tmp_path) -> None:
    bundle = run_task(tmp_path / "b", "calibrate", environment=STATED)
    report = summary(bundle)
    assert report["kind"] == "calibration"
    assert report["values"]["count"] > report["differences"]["count"] > 0
    assert len(episodes(bundle)) == 3 * 2
    assert [set(line) >= {"step", "spearman_values"} for line in metrics(bundle)] == [True]
    (shown,) = collect_report(view_folder(bundle)).calibrations
    assert shown.text.startswith("Values of prefixes against Monte Carlo: Spearman ")
    assert len(shown.figures) == 2


def test_environment_without_reference_answers_is_refused(tmp_path) -> None:
    with pytest.raises(RequestError, match="states no right answer"):
        run_task(tmp_path / "b", "calibrate")


def test_plan_counts_answers_and_spec_requires_answer_values() -> None:
    plan = load_plugin("calibrate").plan(make_job("calibrate", environment=SUMS))
    assert plan["answers"] == "3 held-out tasks x 2 = 6"
    for process in ("montecarlo", None):
        with pytest.raises(ValidationError, match="takes process_rewards: answer"):
            CalibrateSpec(checkpoint="sft", process_rewards=process)
