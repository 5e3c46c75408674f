"""Held-out evaluation during training: the best step and warnings, from the lines of metrics.jsonl.

A figure such as eval/heldout/pass@1 is in the lines of the evaluated steps, with its bounds as
eval/heldout/pass@1/low and /high.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from perilune.metrics.bootstrap import Interval, paired_difference
from perilune.metrics.proportion import pass_rate_change, wilson_interval

GAP_EVALUATIONS = 2  # evaluations in a row in which training is clearly better, before the warning
TABLE_ROWS = 12  # of the table of a curve
LOWER_IS_BETTER = ("loss", "nll")  # suffixes of figures of which the lowest is best

Lines = Sequence[Mapping[str, Any]]


def list_evaluations(lines: Lines, figure: str) -> list[tuple[int, Interval]]:
    """Return the steps at which the figure was measured, each with its interval."""
    return [
        (line["step"], Interval(line[figure], line[f"{figure}/low"], line[f"{figure}/high"]))
        for line in lines
        if figure in line
    ]


def best_evaluation(lines: Lines, figure: str) -> int | None:
    """Return the step with the best mean, the earlier of equals; None before the first evaluation."""
    sign = 1 if figure.endswith(LOWER_IS_BETTER) else -1
    scores = [(sign * interval.mean, step) for step, interval in list_evaluations(lines, figure)]
    return min(scores)[1] if scores else None


def evaluations_since_best(lines: Lines, figure: str) -> int:
    best = best_evaluation(lines, figure)
    return sum(best is not None and step > best for step, _ in list_evaluations(lines, figure))


def training_rate(lines: Lines, after: int, until: int) -> Interval | None:
    """Return the pass rate of training over the steps in (after, until], with Wilson's interval.

    Each group counts as one trial, since answers to one task are not independent: the interval is rather too
    wide. None when the stage samples no answers.
    """
    within = [line for line in lines if after < line["step"] <= until and "pass_rate" in line]
    weights = [line.get("groups", 1) for line in within]
    if not within:
        return None
    rate = math.fsum(w * line["pass_rate"] for w, line in zip(weights, within, strict=True)) / sum(weights)
    return wilson_interval(rate * sum(weights), int(sum(weights)))


def gap_warning(lines: Lines, figure: str, tasks: int) -> str:
    """Return a warning that training is clearly better than held-out tasks, or "".

    The rule: at each of the last `GAP_EVALUATIONS` evaluations after the start, the 95% interval (Wilson) of
    training's pass rate since the evaluation before lies above that of the held-out pass rate.

    Args:
        figure: the held-out pass@1 on the environment that is trained on.
        tasks: number of its tasks, each of which counts as one trial.
    """
    measured = list_evaluations(lines, figure)
    steps = [step for step, _ in measured]
    pairs = [
        (training_rate(lines, before, step), wilson_interval(interval.mean * tasks, tasks))
        for before, (step, interval) in zip(steps, measured[1:], strict=False)
    ][-GAP_EVALUATIONS:]
    clear = [train is not None and train.low > held_out.high for train, held_out in pairs]
    if len(clear) < GAP_EVALUATIONS or not all(clear):
        return ""
    train, held = pairs[-1]
    assert train is not None
    return (
        f"training passes {train:.1%} and held-out tasks {held:.1%}, clearly less at the"
        f" last {GAP_EVALUATIONS} evaluations: the policy learns the training tasks, not the skill. Train on"
        " more or more varied tasks, train fewer steps, or set eval.output: best"
    )


def change_between(
    values: Sequence[Mapping[str, Any]], name: str, figure: str, *, before: int, after: int, seed: int
) -> Interval | None:
    """Return the change of a figure of a set between two evaluations, paired by task or example.

    Args:
        values: the lines of evaluations.jsonl.
    """
    sides: list[Mapping[str, float]] = [
        next((line[figure] for line in values if (line["step"], line["set"]) == (step, name)), {})
        for step in (before, after)
    ]
    shared = sides[0].keys() & sides[1].keys()  # tasks without a verdict are missing
    if not shared:
        return None
    compare = pass_rate_change if figure == "pass@1" else paired_difference
    return compare(*({key: side[key] for key in shared} for side in sides), seed=seed)


def fall_warning(name: str, figure: str, change: Interval | None) -> str:
    """Return a warning that a figure is clearly worse at the end than before training, or ""."""
    if change is None:
        return ""
    if figure.endswith(LOWER_IS_BETTER):
        if change.low <= 0:
            return ""
        moved = f"rose by {change:.3g}"
    elif change.high < 0:
        mean, high, low = (-100 * value for value in change)
        moved = f"fell by {mean:.1f} points ({low:.1f} to {high:.1f})"
    else:
        return ""
    return (
        f"{figure} of {name} {moved} since the start: training made it worse. Lower lr, train fewer steps, or"
        " set eval.output: best"
    )


def curve_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """Return `summary["held_out"]` as a table with a head: steps, training's pass rate and the sets.

    Of many evaluations, `TABLE_ROWS` are shown: evenly spaced, with the first, the best and the last.
    """
    sets, curve = found["sets"], found["curve"]
    selected = {round(index * (len(curve) - 1) / (TABLE_ROWS - 1)) for index in range(TABLE_ROWS)}
    selected |= {index for index, row in enumerate(curve) if row["step"] == found["best"]}
    rates = any(row["training"] for row in curve)
    table = [["step", *(["training"] if rates else []), *(f"{n} {s['figure']}" for n, s in sets.items())]]
    for index, row in enumerate(curve):
        if index in selected:
            cells = [_format_cell("pass@1", row["training"])] if rates else []
            cells += [_format_cell(entry["figure"], row[name]) for name, entry in sets.items()]
            table.append([f"{row['step']}{' (best)' if row['step'] == found['best'] else ''}", *cells])
    return table


def curve_notes(found: Mapping[str, Any]) -> list[str]:
    """Return sentences about `summary["held_out"]`: the changes, the output checkpoint, an early stop."""
    notes = []
    for name, entry in found["sets"].items():
        if change := entry["change"]:
            scale, unit = (1, " nats") if entry["figure"].endswith(LOWER_IS_BETTER) else (100, " points")
            mean, low, high = (scale * change[key] for key in ("mean", "low", "high"))
            digits = 3 if scale == 1 else 1
            notes.append(
                f"{name}: {entry['figure']} changed by {mean:+.{digits}f}{unit} since the start"
                f" ({low:+.{digits}f} to {high:+.{digits}f}, paired)"
            )
    step = found["best"] if found["output"] == "best" else found["curve"][-1]["step"]
    notes.append(f"output: the {found['output']} checkpoint, of step {step}")
    return notes + ([f"stopped early: {found['stopped']}"] if found["stopped"] else [])


def _format_cell(figure: str, interval: Mapping[str, float] | None) -> str:
    if interval is None:
        return ""
    mean, low, high = bounds = Interval(**interval)
    if figure.endswith(LOWER_IS_BETTER):
        return f"{bounds:.4g}"
    return f"{mean:.1%} ({100 * low:.1f} to {100 * high:.1f})"
