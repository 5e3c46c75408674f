"""Decomposition of the difference between two evaluations."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_report_browser import make_comparison

from perilune.cli.train.results import paired_change
from perilune.files import write_json_lines
from perilune.ui.evaluations import (
    UNRECOGNIZED,
    Evaluation,
    compare_evaluations,
    read_evaluation,
    split_by_strategy,
)
from perilune.ui.experiment_comparison import comparison_charts
from perilune.ui.headline import format_percent, write_headline


def evaluation(name: str = "a", **summary: Any) -> Evaluation:
    pass_at_1 = summary.pop("pass_at_1", 0.5)
    result = read_evaluation(
        name,
        name,
        {"pass@1": {"mean": pass_at_1, "low": 0.0, "high": 1.0}, **summary},
        summary.pop("greedy_by_task", {}),
    )
    assert result is not None
    return result


def evaluation_of_strategies(strategies: dict[str, tuple[float, float | None]]) -> Evaluation:
    mean = sum(share * (accuracy or 0.0) for share, accuracy in strategies.values())
    rows = {name: {"share": share, "accuracy": accuracy} for name, (share, accuracy) in strategies.items()}
    return evaluation(pass_at_1=mean, strategies=rows)


def test_percentages_round_ties_up_as_the_charts_do() -> None:
    assert [format_percent(share) for share in (0.5625, 0.0625, 0.3, 1.0)] == [
        "56.3%",
        "6.3%",
        "30.0%",
        "100.0%",
    ]


def test_decompose_attributes_measured_gain_mostly_to_strategy_choice() -> None:
    before = evaluation_of_strategies({"scratchpad": (0.40, 0.673), "direct": (0.60, 0.008)})
    after = evaluation_of_strategies({"scratchpad": (0.993, 0.800), "direct": (0.007, 0.0)})
    parts = {part.strategy: part for part in split_by_strategy(before, after)}
    assert parts["scratchpad"].from_share == pytest.approx(0.593 * (0.673 + 0.800) / 2)
    assert parts["scratchpad"].from_accuracy == pytest.approx(0.127 * (0.40 + 0.993) / 2)
    assert parts["direct"].from_share == pytest.approx(-0.593 * 0.004)
    share = sum(part.from_share for part in parts.values())
    total = after.measures["pass@1"][0] - before.measures["pass@1"][0]
    assert 0.75 < share / total < 0.90


def test_headline_names_the_strategy_with_the_largest_contribution() -> None:
    before = evaluation_of_strategies({"direct": (0.01, 0.0), "none": (0.70, 0.0), "scratchpad": (0.29, 0.0)})
    after = evaluation_of_strategies({"direct": (0.49, 0.007), "scratchpad": (0.51, 0.49)})
    _, explained = write_headline([before, after], compare_evaluations(before, after), None, []).paragraphs
    assert "choosing “scratchpad” more often (29% → 51% of answers)" in explained


shares = st.lists(st.floats(0.01, 1), min_size=3, max_size=3).map(
    lambda parts: [part / sum(parts) for part in parts]
)
accuracies = st.lists(st.floats(0, 1), min_size=3, max_size=3)


@given(shares, accuracies, shares, accuracies)
def test_contributions_sum_to_the_difference_and_are_antisymmetric(
    s0: Any, a0: Any, s1: Any, a1: Any
) -> None:
    before = evaluation_of_strategies(dict(zip("xyz", zip(s0, a0, strict=True), strict=True)))
    after = evaluation_of_strategies(dict(zip("xyz", zip(s1, a1, strict=True), strict=True)))
    there, back = split_by_strategy(before, after), split_by_strategy(after, before)
    total = after.measures["pass@1"][0] - before.measures["pass@1"][0]
    assert sum(part.from_share + part.from_accuracy for part in there) == pytest.approx(total, abs=1e-9)
    for forth, reverse in zip(there, back, strict=True):
        assert forth.from_share == pytest.approx(-reverse.from_share)
        assert forth.from_accuracy == pytest.approx(-reverse.from_accuracy)


def test_new_strategy_contributes_by_share_alone() -> None:
    before = evaluation_of_strategies({"direct": (1.0, 0.2)})
    after = evaluation_of_strategies({"direct": (0.5, 0.2), "scratchpad": (0.5, 0.9)})
    new = next(part for part in split_by_strategy(before, after) if part.strategy == "scratchpad")
    assert new.accuracy == (None, 0.9)
    assert (new.from_share, new.from_accuracy) == (pytest.approx(0.45), 0.0)


def test_rare_strategies_merge_into_one_row_and_preserve_sums() -> None:
    before = evaluation_of_strategies({"direct": (0.99, 0.2), "guess": (0.004, 0.5), "quote": (0.006, 0.0)})
    after = evaluation_of_strategies({"direct": (0.988, 0.6), "guess": (0.008, 0.25), "quote": (0.004, 1.0)})
    parts = split_by_strategy(before, after)
    assert [part.strategy for part in parts] == ["direct", "2 strategies under 1%"]
    assert parts[1].share == (pytest.approx(0.01), pytest.approx(0.012))
    assert parts[1].accuracy == (pytest.approx(0.2), pytest.approx(0.5))
    total = after.measures["pass@1"][0] - before.measures["pass@1"][0]
    assert sum(part.from_share + part.from_accuracy for part in parts) == pytest.approx(total)


def test_single_rare_strategy_stays_unnamed() -> None:
    before = evaluation_of_strategies({"direct": (1.0, 0.2)})
    after = evaluation_of_strategies({"direct": (0.995, 0.2), "guess": (0.005, 1.0)})
    assert [part.strategy for part in split_by_strategy(before, after)] == ["direct", "1 strategy under 1%"]


def test_answers_without_a_strategy_count_as_unrecognized() -> None:
    before = evaluation(pass_at_1=0.3, strategies={"direct": {"share": 0.5, "accuracy": 0.2}})
    after = evaluation(pass_at_1=0.3, strategies={"direct": {"share": 1.0, "accuracy": 0.3}})
    rest = next(part for part in split_by_strategy(before, after) if part.strategy == UNRECOGNIZED)
    assert rest.share == (0.5, 0.0)
    assert rest.accuracy[0] == pytest.approx(0.4)


def test_differences_are_paired_over_shared_tasks() -> None:
    before = evaluation("b", correct_per_task=[[f"t{i}", 8, 2] for i in range(40)])
    after = evaluation("a", correct_per_task=[[f"t{i}", 8, 6] for i in range(1, 40)])
    comparison = compare_evaluations(before, after)
    assert comparison.tasks == 39
    # All tasks gained equally. The interval allows for this share of tasks that fall to 0 or rise to 1.
    share = 1.96**2 / (39 + 1.96**2)
    bounds = (0.5, 0.5 - 1.5 * share, 0.5 + 0.5 * share)
    assert tuple(comparison.differences["pass@1"]) == pytest.approx(bounds, abs=1e-4)


@pytest.mark.parametrize("shared", [0, 30])
def test_evaluations_of_different_tasks_have_no_differences(shared: int) -> None:
    """The report shows the rates of all tasks, which a change over a part of them could contradict."""
    before = evaluation("b", correct_per_task=[[f"t{i}", 8, 2] for i in range(40)])
    after = evaluation("a", correct_per_task=[[f"t{i + 40 - shared}", 8, 6] for i in range(40)])
    assert compare_evaluations(before, after).differences == {}


def test_report_and_terminal_state_the_same_differences() -> None:
    """Both leave a task with seven scored answers out of pass@8, and pair the common tasks."""
    shared = [["t0", 7, 2], *([f"t{i}", 8, i % 3] for i in range(1, 30))]
    summaries = [
        {"correct_per_task": [*shared, ["b", 8, 1]]},
        {"correct_per_task": [*([task, n, 2 * right] for task, n, right in shared), ["a", 8, 8]]},
    ]
    report = compare_evaluations(*(evaluation(**row, **{"pass@8": 0.5}) for row in summaries))
    terminal = paired_change(*summaries)
    assert (report.tasks, set(report.differences)) == (terminal.pop("tasks"), {"pass@1", "pass@8"})
    assert {name: change._asdict() for name, change in report.differences.items()} == terminal


def test_measure_of_one_evaluation_has_no_difference() -> None:
    common = [[f"t{i}", 8, 2] for i in range(20)]
    before, after = ({"correct_per_task": [*common, *rows]} for rows in ([["u", 1, 0]], []))
    both = [evaluation(**before), evaluation(**after, **{"pass@8": 0.5})]
    assert set(compare_evaluations(*both).differences) == {"pass@1"}
    assert write_headline(both, compare_evaluations(*both), None, []).title


def test_headline_names_a_measure_that_moved_the_other_way() -> None:
    """Before: two of eight samples right on every task. After: all samples right on half the tasks."""
    tasks = 40
    before = evaluation(
        "before",
        pass_at_1=0.25,
        **{"pass@8": 1.0, "correct_per_task": [(str(task), 8, 2) for task in range(tasks)]},
    )
    after = evaluation(
        "after",
        pass_at_1=0.5,
        **{"pass@8": 0.5, "correct_per_task": [(str(task), 8, 8 * (task % 2)) for task in range(tasks)]},
    )
    headline = write_headline([before, after], compare_evaluations(before, after), None, [])
    assert headline.title == "pass@1 rose from 25.0% to 50.0%; pass@8 fell from 100.0% to 50.0%"
    lost = "the model can no longer solve tasks that it solved sometimes before"
    assert f"pass@8 fell from 100.0% to 50.0%: {lost}." in headline.paragraphs[1]


def test_headline_names_every_measure_that_fell() -> None:
    """Before: two of eight samples right on every task. After: one of eight on half the tasks."""
    before, after = (
        evaluation(name, pass_at_1=rate, **{"pass@8": most, "correct_per_task": right})
        for name, rate, most, right in (
            ("before", 0.25, 1.0, [(str(task), 8, 2) for task in range(40)]),
            ("after", 0.0625, 0.5, [(str(task), 8, task % 2) for task in range(40)]),
        )
    )
    headline = write_headline([before, after], compare_evaluations(before, after), None, [])
    assert headline.title == "pass@1 fell from 25.0% to 6.3%; pass@8 fell from 100.0% to 50.0%"


def test_compared_curves_have_all_seeds_at_each_step(tmp_path: Path) -> None:
    """Runs of different lengths are thinned to the same steps, so no step is the value of one seed."""
    comparison = make_comparison(tmp_path)
    for seed, steps in enumerate((1000, 800, 900)):
        rows = [{"step": step, "reward": float(seed)} for step in range(1, steps + 1)]
        write_json_lines(tmp_path / f"0-{seed}" / "artifacts" / "metrics.jsonl", rows)
    (chart,) = comparison_charts(comparison)
    curve = chart.curves[0]
    assert len(curve.step) <= 400
    assert {mean for step, mean in zip(curve.step, curve.mean, strict=True) if step <= 800} == {1.0}
