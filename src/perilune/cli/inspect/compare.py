"""`perilune compare`: experiments side by side, in the terminal, as JSON or as a page."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.arguments import Json, check_output_file, open_control
from perilune.cli.output import (
    NARROW_COLUMNS,
    as_markup,
    echo,
    make_console,
    make_table,
    print_json,
    wrap_text,
)
from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.control.queries.comparison import Arm, Comparison
    from perilune.control.runs.experiments import Control
    from perilune.metrics.bootstrap import Interval
    from perilune.recipe.axes import Settings

MAX_SETTING_COLUMNS = 4  # settings that get a column of their own
BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 24


def compare(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPERIMENT|SWEEP...",
            help="Sweeps or experiments: names, or first characters of ids. A name selects all experiments "
            "with this name.",
        ),
    ],
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE.METRIC", help="Metric to compare. Default: pass@1 of the last evaluation."
        ),
    ] = None,
    baseline: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Number of the arm with which the other arms are compared."),
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", callback=check_output_file, help="Also write a self-contained HTML page."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare experiments: the settings that differ, one final metric of each, and paired differences.

    Experiments that differ only in their seed are one arm. Differences are paired by seed (Student's t) and
    corrected for the number of arms (Holm). With fewer than three common seeds no claim is made.

    \b
    perilune compare words-1
    perilune compare 01JQ8 01JQ9 --metric rl.last.reward
    perilune compare words-1 --baseline 2 --out page.html
    """
    from perilune.ui.experiment_comparison import build_comparison

    control = open_control()
    comparison = compare_targets(control, targets, metric, baseline)
    page = build_comparison(comparison, out) if out is not None else None
    if as_json:
        print_json(comparison_document(comparison) | ({"page": str(page)} if page else {}))
    else:
        print_comparison(comparison)
        if follow_up := unbiased_command(control, targets, comparison):
            echo(f"  {follow_up}")
        if page is not None:
            echo(f"{page} ({page.stat().st_size / 1e6:.1f} MB)")


def compare_targets(
    control: Control, targets: Sequence[str], metric: str | None, baseline: int
) -> Comparison:
    """Return the comparison of at least two experiments; `baseline` counts from 1."""
    from perilune.control.queries.comparison import compare_experiments

    comparison = compare_experiments(control, targets, metric=metric, baseline=baseline - 1)
    if sum(len(arm.members) for arm in comparison.arms) < 2:
        raise RequestError(
            f"there is only one experiment: {', '.join(targets)}",
            remedy="name a sweep, or several experiments by id; perilune runs --json lists them",
        )
    return comparison


def print_comparison(comparison: Comparison) -> None:
    """Print the arms as a table, their curves, and the notes on the figures."""
    from perilune.control.queries.comparison import format_settings

    console = make_console()
    console.print(as_markup(f"{comparison.title}: {comparison.metric}"))
    if len(comparison.keys) > MAX_SETTING_COLUMNS:
        for key, *values in zip(comparison.keys, *map(format_settings, comparison.arms), strict=True):
            echo(f"  {key}: {' | '.join(values)}")
    head, *rows = _arm_rows(comparison)
    if console.width < NARROW_COLUMNS:
        for row in rows:
            cells = (f"{name} {cell}" for name, cell in zip(head, row, strict=True) if cell)
            echo(wrap_text(", ".join(cells), indent=2))
    else:
        console.print(_arm_table(head, rows))
    for line in _curves(comparison):
        echo(line)
    for note in comparison.notes:
        echo(wrap_text(f"* {note}", indent=2))


def _arm_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    table = make_table("arm", left=0)
    *keys, seeds, figure, difference = head[1:]
    for key in keys:
        table.add_column(as_markup(key), overflow="fold")
    for name in (seeds, figure):
        table.add_column(as_markup(name), justify="right", no_wrap=True)
    table.add_column(difference, overflow="fold")
    for row in rows:
        table.add_row(*map(as_markup, row))
    return table


def _arm_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the names of the columns, and a row for each arm."""
    from perilune.control.queries.comparison import describe_difference, format_settings

    keys = comparison.keys if len(comparison.keys) <= MAX_SETTING_COLUMNS else ()
    rows = [("arm", *keys, "seeds", comparison.metric.rpartition(".")[2], "difference")]
    for index, arm in enumerate(comparison.arms):
        settings = format_settings(arm) if keys else ()
        seeds = str(len(arm.finished_members))
        if len(arm.finished_members) < len(arm.members):
            seeds += f" of {len(arm.members)}"
        difference = "baseline" if index == comparison.baseline else ""
        if arm.difference is not None:
            difference = describe_difference(arm.difference, is_share=comparison.is_share)
        number = f"{index + 1}{'*' if index == comparison.best else ''}"
        rows.append((number, *settings, seeds, _format_figure(arm, comparison.is_share), difference))
    return rows


def _format_figure(arm: Arm, is_share: bool) -> str:
    if arm.figure is None:
        return "–"
    figure = _clip_share(arm.figure) if is_share else arm.figure
    form = ".1%" if is_share else ".4g"
    return f"{figure:{form}}" if math.isfinite(figure.low) else f"{figure.mean:{form}}"


def _clip_share(figure: Interval) -> Interval:
    """Return the figure with its interval from 0 to 1, of which Student's t does not know."""
    if not math.isfinite(figure.low):
        return figure
    return figure._replace(low=max(figure.low, 0.0), high=min(figure.high, 1.0))


def _curves(comparison: Comparison) -> list[str]:
    """Return the first curve of the last stage that has one: a line of bars for each arm, on one scale."""
    from perilune.ui.experiment_comparison import comparison_charts

    charts = comparison_charts(comparison)
    if not charts:
        return []
    chart = next(chart for chart in charts if chart.stage == charts[-1].stage)
    values = [value for curve in chart.curves for value in curve.mean]
    low, high = min(values), max(values)
    lines = [f"{chart.title} of {chart.stage}, from {low:.3g} to {high:.3g}:"]
    lines += (f"  {curve.arm + 1:>3} {_format_bars(curve.mean, low, high)}" for curve in chart.curves)
    return lines


def _format_bars(values: Sequence[float], low: float, high: float) -> str:
    """Return the values as one line of block characters; neighbors are averaged to fit."""
    width = min(CURVE_WIDTH, len(values))
    cuts = [round(index * len(values) / width) for index in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    spread = (high - low) or 1.0
    return "".join(BARS[round((value - low) / spread * (len(BARS) - 1))] for value in means)


def unbiased_command(control: Control, targets: Sequence[str], comparison: Comparison) -> str:
    """Return the command that runs the best arm and the baseline on new seeds; "" if there is none."""
    from perilune.control.runs.sweeps import find_sweep

    sweep = find_sweep(control, targets[0]) if len(targets) == 1 else None
    if sweep is None or comparison.best is None:
        return ""

    def settings_of(*indices: int) -> list[Settings]:
        chosen = {member.experiment for index in indices for member in comparison.arms[index].members}
        return [arm.settings for arm in sweep.arms if chosen & set(arm.experiments.values())]

    settings, best = settings_of(comparison.best, comparison.baseline), settings_of(comparison.best)[0]
    varied = [values for values in zip(*settings, strict=True) if len(set(values)) > 1]
    options = list(best)
    if len(varied) == 1:  # a grid over one key holds both arms
        key = varied[0][0].partition("=")[0]
        both = ",".join(dict.fromkeys(option.partition("=")[2] for option in varied[0]))
        options = [f"{key}={both}" if option.startswith(f"{key}=") else option for option in best]
    seeds = sorted(seed for arm in sweep.arms for seed in arm.experiments)
    fresh = f"{seeds[-1] + 1}..{seeds[-1] + max(3, len(set(seeds)))}"
    words = [part for option in options for part in ("--set", option)]
    metric = ["--metric", sweep.metric] if sweep.metric else []
    return shlex.join(["perilune", "sweep", sweep.recipe, *words, "--seeds", fresh, *metric])


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON, without curves."""

    def interval(value: Any) -> Any:
        if value is None:
            return None
        return {key: number if math.isfinite(number) else None for key, number in value._asdict().items()}

    arms = []
    for arm in comparison.arms:
        test = None if arm.difference is None else asdict(arm.difference.seeds)
        if arm.difference is not None and test is not None:
            test = {key: None if value in (math.inf, -math.inf) else value for key, value in test.items()}
            test |= {"conclusion": arm.difference.seeds.conclusion, "tasks": interval(arm.difference.tasks)}
        arms.append(
            {
                "label": arm.label,
                "settings": dict(arm.settings),
                "figure": interval(
                    _clip_share(arm.figure) if arm.figure and comparison.is_share else arm.figure
                ),
                "difference": test,
                "seeds": [
                    {
                        "seed": member.seed,
                        "experiment_id": member.experiment,
                        "figure": interval(member.figure),
                    }
                    | ({"problem": member.problem} if member.problem else {})
                    for member in arm.members
                ],
            }
        )
    return {
        "title": comparison.title,
        "metric": comparison.metric,
        "keys": list(comparison.keys),
        "baseline": comparison.baseline + 1,
        "best": None if comparison.best is None else comparison.best + 1,
        "arms": arms,
        "notes": list(comparison.notes),
    }
