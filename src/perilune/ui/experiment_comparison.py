"""The page and the curves of a comparison of experiments."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import perilune
from perilune.bundle.storage import storage_errors
from perilune.control.queries.comparison import Arm, Comparison, Member, describe_difference, format_settings
from perilune.files import write_atomic
from perilune.metrics.across_seeds import MIN_SEEDS, t_interval
from perilune.ui.attempt import Attempt, Columns
from perilune.ui.curves import even_places
from perilune.ui.overview import format_day
from perilune.ui.report import CHART_SCRIPTS, render_page

SCRIPTS = (*CHART_SCRIPTS, "comparison.js")
MAX_POINTS = 400
CURVE_TITLES = {
    "reward": "Reward",
    "pass_rate": "Pass rate",
    "loss": "Loss",
    "validation_loss": "Held-out loss",
    "accuracy": "Accuracy on pairs",
    "validation_accuracy": "Held-out accuracy on pairs",
    "entropy": "Entropy",
    "length": "Length of answers",
    "kl_reference": "KL to the reference",
    "dead_groups": "Dead groups",
    "grad_norm": "Gradient norm",
}
HELDOUT_PREFIX = "eval/"  # begins the keys of evaluations during training, eval/heldout/pass@1
ENVIRONMENT_PREFIX = "environment/"  # begins the keys of the parts of a mixture, environment/sums/pass_rate


@dataclass(frozen=True, slots=True)
class Curve:
    """Mean of a metric over the seeds of an arm, and its interval, by step; `arm` is the index of the arm."""

    arm: int
    step: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True, slots=True)
class Chart:
    """One metric of one stage, with a curve for each arm."""

    stage: str
    metric: str
    title: str
    curves: list[Curve]


def build_comparison(comparison: Comparison, out: Path) -> Path:
    """Write the page of a comparison to `out` and return it.

    Raises:
        RequestError: when `out` cannot be written.
    """
    page = render_page(f"Comparison: {comparison.title}", SCRIPTS, comparison_document(comparison))
    with storage_errors("write the page", out):
        write_atomic(out, page)
    return out


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    enough = all(len(arm.finished_members) >= MIN_SEEDS for arm in comparison.arms)
    return {
        "title": comparison.title,
        "metric": comparison.metric,
        "stage": comparison.metric.partition(".")[0],
        "isShare": comparison.is_share,
        "keys": comparison.keys,
        "baseline": comparison.baseline,
        "best": comparison.best,
        "notes": comparison.notes,
        "arms": [_arm_document(arm, comparison.is_share) for arm in comparison.arms],
        "charts": comparison_charts(comparison),
        "area": "95% intervals over seeds (Student's t)"
        if enough
        else "the range from the lowest to the highest seed",
        "footer": f"Written by Perilune {perilune.__version__} on {format_day(time.time())}."
        " This file is self-contained and loads nothing from other places.",
    }


def _arm_document(arm: Arm, is_share: bool) -> dict[str, Any]:
    difference = arm.difference
    document = None
    if difference is not None:
        over_seeds = len(difference.seeds.differences) >= MIN_SEEDS or difference.tasks is None
        test = difference.seeds
        document = {
            "interval": (test.mean, test.low, test.high) if over_seeds else difference.tasks,
            "text": describe_difference(difference, is_share=is_share),
        }
    return {
        "label": arm.label,
        "settings": format_settings(arm),
        "figure": arm.figure,
        "seeds": [
            {
                "seed": run.seed,
                "experiment": run.experiment,
                "figure": run.figure,
                "problem": run.problem,
                "tasks": run.tasks,
            }
            for run in arm.members
        ],
        "difference": document,
    }


def comparison_charts(comparison: Comparison) -> list[Chart]:
    """Return the curves of all training stages that differ between arms."""
    charts = []
    for stage in dict.fromkeys(
        stage.name for arm in comparison.arms for member in arm.members for stage in member.stages
    ):
        is_shared_or_pending = len({_run_ids(arm, stage) for arm in comparison.arms}) == 1
        if len(comparison.arms) > 1 and is_shared_or_pending:
            continue
        columns = [[_read_columns(member, stage) for member in arm.members] for arm in comparison.arms]
        for metric in _list_metrics(columns):
            curves = [_mean_curve(index, runs, metric) for index, runs in enumerate(columns)]
            known = [curve for curve in curves if curve is not None]
            if any(len(curve.step) > 1 for curve in known):
                name = metric.removeprefix(HELDOUT_PREFIX).removeprefix(ENVIRONMENT_PREFIX).replace("_", " ")
                title = CURVE_TITLES.get(metric, name)
                charts.append(Chart(stage, metric, title, known))
    return charts


def _run_ids(arm: Arm, stage: str) -> tuple[str, ...]:
    return tuple(status.run_id for member in arm.members for status in member.stages if status.name == stage)


def _read_columns(member: Member, stage: str) -> Columns:
    folder = next((status.attempt_dir for status in member.stages if status.name == stage), None)
    return Attempt(folder).metrics


def _list_metrics(columns: Sequence[Sequence[Columns]]) -> list[str]:
    """Return the metrics that some run has: those on held-out tasks first."""
    names = dict.fromkeys(name for arm in columns for run in arm for name in run)
    held_out = [
        name for name in names if name.startswith(HELDOUT_PREFIX) and not name.endswith(("/low", "/high"))
    ]
    parts = [name for name in names if name.startswith(ENVIRONMENT_PREFIX) and name.endswith("/pass_rate")]
    return [*held_out, *(name for name in CURVE_TITLES if name in names), *parts]


def _mean_curve(arm: int, runs: Sequence[Mapping[str, Sequence[Any]]], metric: str) -> Curve | None:
    values: dict[int, list[float]] = {}
    for run in runs:
        for step, value in zip(run.get("step", ()), run.get(metric, ()), strict=False):
            if isinstance(value, int | float) and math.isfinite(value):
                values.setdefault(int(step), []).append(float(value))
    if not values:
        return None
    known = sorted(values)
    steps = [known[place] for place in even_places(len(known), MAX_POINTS)]
    bounds = [_seed_interval(values[step]) for step in steps]
    means = [fmean(values[step]) for step in steps]
    return Curve(arm, steps, means, [low for low, _ in bounds], [high for _, high in bounds])


def _seed_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval over seeds; with few seeds, the range."""
    if len(values) < MIN_SEEDS:
        return min(values), max(values)
    interval = t_interval(values)
    return interval["low"], interval["high"]
