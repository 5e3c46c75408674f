"""Rules about held-out curves, on hand-written metric lines."""

from typing import Any

import pytest

from perilune.metrics.bootstrap import Interval
from perilune.metrics.held_out import (
    best_evaluation,
    change_between,
    curve_notes,
    curve_rows,
    evaluations_since_best,
    fall_warning,
    gap_warning,
    training_rate,
)

FIGURE = "eval/heldout/pass@1"


def line(step: int, held: float | None = None, train: float | None = None, **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, **more}
    if held is not None:
        row |= {FIGURE: held, f"{FIGURE}/low": held - 0.1, f"{FIGURE}/high": held + 0.1}
    if train is not None:
        row |= {"pass_rate": train, "groups": 32}
    return row


def test_best_evaluation_is_the_earliest_among_ties() -> None:
    lines = [line(0, 0.1), line(5, 0.4), line(7), line(10, 0.4), line(15, 0.3)]
    assert best_evaluation(lines, FIGURE) == 5
    assert evaluations_since_best(lines, FIGURE) == 2
    assert best_evaluation([line(3)], FIGURE) is None
    assert evaluations_since_best([line(3)], FIGURE) == 0
    loss = [
        {"step": step, "eval/data/loss": value, "eval/data/loss/low": 0, "eval/data/loss/high": 9}
        for step, value in ((0, 2.0), (5, 1.0), (10, 1.5))
    ]
    assert best_evaluation(loss, "eval/data/loss") == 5


def test_training_rate_covers_groups_since_the_last_evaluation() -> None:
    lines = [line(1, train=1.0), line(2, train=0.0) | {"groups": 96}, line(3, train=0.5)]
    rate = training_rate(lines, 0, 2)
    assert rate is not None
    assert rate.mean == 0.25
    assert rate.low == pytest.approx(0.1833, abs=1e-3)  # Wilson's, for 32 of 128
    assert rate.high == pytest.approx(0.3314, abs=1e-3)
    assert training_rate([line(1)], 0, 1) is None


@pytest.mark.parametrize(
    ("held", "train", "warns"),
    [
        ((0.0, 0.0, 0.0), (0.84, 0.84), True),  # must warn
        ((0.0, 0.8, 0.0), (0.84, 0.84), False),  # a single evaluation is not enough
        ((0.0, 0.0, 0.8), (0.84, 0.84), False),  # the held-out rate has caught up
        ((0.0, 0.7, 0.7), (0.84, 0.84), False),  # the intervals overlap
        ((0.0, 0.84, 0.84), (0.1, 0.1), False),  # held-out tasks are the easier ones
        ((0.0, 0.0), (0.84,), False),
    ],
)
def test_gap_warning_needs_two_evaluations_with_disjoint_intervals(
    held: tuple[float, ...], train: tuple[float, ...], warns: bool
) -> None:
    lines = [line(0, held[0])]
    for number, (score, rate) in enumerate(zip(held[1:], train, strict=True), 1):
        lines += [line(2 * number - 1, train=rate), line(2 * number, score, rate)]
    warning = gap_warning(lines, FIGURE, 64)
    assert bool(warning) == warns
    if warns:
        assert "training passes 84.0% (73.1% to 91.0%) and held-out tasks 0.0% (0.0% to 5.7%)" in warning


def test_change_since_pairs_values_by_task() -> None:
    values = [
        {"step": 0, "set": "heldout", "pass@1": {str(task): 1.0 for task in range(20)} | {"gone": 1.0}},
        {"step": 9, "set": "other", "pass@1": {"0": 1.0}},
        {"step": 9, "set": "heldout", "pass@1": {str(task): float(task >= 10) for task in range(20)}},
    ]
    change = change_between(values, "heldout", "pass@1", before=0, after=9, seed=1)
    assert change is not None
    assert change.mean == -0.5
    assert change.high < 0
    assert "pass@1 of heldout fell by 50.0 points" in fall_warning("heldout", "pass@1", change)
    assert change_between(values, "other", "pass@1", before=0, after=9, seed=1) is None
    assert fall_warning("heldout", "pass@1", Interval(-0.1, -0.3, 0.1)) == ""
    assert fall_warning("data", "loss", Interval(-0.1, -0.2, -0.05)) == ""
    assert "loss of data rose by 0.1" in fall_warning("data", "loss", Interval(0.1, 0.05, 0.2))


def test_long_curves_keep_first_best_and_last_rows() -> None:
    def rate(mean: float) -> dict[str, float]:
        return {"mean": mean, "low": mean, "high": mean}

    document: dict[str, Any] = {
        "figure": FIGURE,
        "best": 37,
        "output": "best",
        "curve": [
            {
                "step": step,
                "training": rate(0.5) if step else None,
                "heldout": rate(step / 100),
                "data": rate(2),
            }
            for step in range(101)
        ],
        "sets": {
            "heldout": {"figure": "pass@1", "change": {"mean": 0.5, "low": 0.25, "high": 0.75}},
            "data": {"figure": "loss", "change": None},
        },
        "stopped": "no gain",
    }
    head, *rows = curve_rows(document)
    assert head == ["step", "training", "heldout pass@1", "data loss"]
    assert [row[0] for row in rows if row[0] in ("0", "37 (best)", "100")] == ["0", "37 (best)", "100"]
    assert len(rows) == 13
    assert rows[-1][1:] == ["50.0% (50.0 to 50.0)", "100.0% (100.0 to 100.0)", "2 (2 to 2)"]
    assert rows[0][1] == ""
    assert curve_notes(document) == [
        "heldout: pass@1 changed by +50.0 points since the start (+25.0 to +75.0, paired)",
        "output: the best checkpoint, of step 37",
        "stopped early: no gain",
    ]
