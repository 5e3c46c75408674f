"""Writes the finding of the report in sentences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from perilune.metrics.bootstrap import Interval
from perilune.ui.curves import Training
from perilune.ui.evaluations import UNTRAINED, Comparison, Evaluation

EDGE_STEPS = 5  # steps to average at each end of a curve
ALGORITHM_NAMES = {
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "rloo": "RLOO",
    "reinforce_pp": "REINFORCE++",
    "reinforce_pp_baseline": "REINFORCE++ with a baseline",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "cispo": "CISPO",
    "maxrl": "MaxRL",
    "ppo": "PPO",
    "dgpo": "DGPO",
    "gigpo": "GiGPO",
    "pkpo": "PKPO",
    "pass_at_k_training": "pass@k training",
    "toggle": "Toggle",
    "sft": "supervised fine-tuning",
    "dpo": "DPO",
    "dpo_norm": "length-normalized DPO",
    "ipo": "IPO",
    "bradley_terry": "Bradley-Terry reward modeling",
    "reverse_kl": "on-policy distillation (reverse KL)",
    "reverse_topk": "on-policy distillation (top-k reverse KL)",
    "forward_topk": "on-policy distillation (top-k forward KL)",
    "gkd": "generalized knowledge distillation",
}


@dataclass(frozen=True, slots=True)
class Headline:
    """`title` is the finding, `paragraphs` its basis, `explanation` splits the change by strategy."""

    title: str
    paragraphs: tuple[str, ...]
    explanation: str = ""


def write_headline(
    evaluations: Sequence[Evaluation],
    comparison: Comparison | None,
    trained: Training | None,
    other: Sequence[str],
    *,
    is_over: bool = True,
) -> Headline:
    """Return the report's finding.

    Args:
        comparison: the evaluations before and after the training that the report is about.
        trained: the curves of that training.
        other: results of other stages, for an experiment without evaluations.
        is_over: whether no further result will come.
    """
    if comparison is not None:
        by_stage = {evaluation.stage: evaluation for evaluation in evaluations}
        before, after = by_stage[comparison.before], by_stage[comparison.after]
        return _comparison_headline(comparison, before, after, trained)
    if evaluations:
        return _evaluation_headline(evaluations[-1])
    if trained is not None:
        headline = _held_out_headline(trained, is_over=is_over) or _curve_headline(trained, is_over=is_over)
        if headline is not None:
            return headline
    return Headline("No checkpoint was evaluated" if other and is_over else "No results yet", tuple(other))


def _comparison_headline(
    comparison: Comparison, before: Evaluation, after: Evaluation, trained: Training | None
) -> Headline:
    start, end = comparison.accuracy
    change = comparison.differences.get("pass@1")
    if change is None:
        title = f"pass@1 was {format_percent(start)}, then {format_percent(end)} on different tasks"
    elif _direction(change):
        title = _describe_move("pass@1", change, start, end)
    elif format_percent(start) == format_percent(end):
        title = f"pass@1 stayed at {format_percent(end)}"
    else:
        title = f"pass@1 went from {format_percent(start)} to {format_percent(end)}: no clear change"
    if change is not None:
        title += "".join(
            f"; {_describe_move(name, other, before.measures[name][0], after.measures[name][0])}"
            for name, other in comparison.differences.items()
            if name != "pass@1" and (_direction(other) < 0 or _direction(other) > _direction(change))
        )
    paragraphs = [_describe_basis(change, comparison.tasks or after.tasks, trained)]
    if explained := _explain_change(comparison, before, after):
        paragraphs.append(explained)
    return Headline(title, tuple(paragraphs), _explain_split(comparison))


def _direction(change: Interval) -> int:
    """Return 1 for a clear rise, -1 for a clear fall, and 0 where the interval contains no change."""
    return int(change.low > 0) - int(change.high < 0)


def _describe_move(name: str, change: Interval, start: float, end: float) -> str:
    verb = "rose" if _direction(change) > 0 else "fell"
    return f"{name} {verb} from {format_percent(start)} to {format_percent(end)}"


def _describe_basis(change: Interval | None, tasks: int, trained: Training | None) -> str:
    basis = f"On {tasks} held-out tasks"
    if trained is not None and trained.task != "evaluate":
        basis += f", after {trained.description[0].lower() + trained.description[1:].rstrip('.')}"
    if change is None:
        return (
            f"{basis}. The two evaluations judged different tasks, so their difference is not a measurement."
        )
    return (
        f"{basis}: {format_points(change.mean)} points, with a 95% interval of {format_points(change.low)}"
        f" to {format_points(change.high)}, paired by task."
    )


def _explain_change(comparison: Comparison, before: Evaluation, after: Evaluation) -> str:
    sentences = []
    parts = _effect_totals(comparison)
    if parts is not None:
        share, accuracy = parts
        total = share + accuracy
        if abs(total) >= 0.01 and share * total >= 0 and accuracy * total >= 0:
            moved = max(comparison.contributions, key=lambda contribution: contribution.from_share)
            sentences.append(
                f"{share / total:.0%} of the change comes from choosing “{moved.strategy}” more often "
                f"({format_percent(moved.share[0], 0)} → {format_percent(moved.share[1], 0)} of answers), "
                f"{accuracy / total:.0%} from better accuracy within strategies."
                if total > 0
                else f"{share / total:.0%} of the loss comes from the choice of strategy, "
                f"{accuracy / total:.0%} from accuracy within strategies."
            )
    for name in [measure for measure in before.measures if measure not in ("pass@1", "greedy")][-1:]:
        could, does = before.measures[name][0], after.measures["pass@1"][0]
        change = comparison.differences.get(name)
        moved_to = format_percent(after.measures[name][0]) if name in after.measures else ""
        if change is not None and moved_to and _direction(change) < 0:
            lost = "the model can no longer solve tasks that it solved sometimes before"
            sentences.append(f"{name} fell from {format_percent(could)} to {moved_to}: {lost}.")
        elif could >= does > before.measures["pass@1"][0]:
            rose = f"; {name} itself rose to {moved_to}" if change and _direction(change) > 0 else ""
            sentences.append(
                f"{name} was {format_percent(could)} before training: the model now solves reliably what it"
                f" solved sometimes before{rose}."
            )
        elif moved_to and moved_to != format_percent(could):
            sentences.append(f"{name} went from {format_percent(could)} to {moved_to}.")
    return " ".join(sentences)


def _effect_totals(comparison: Comparison) -> tuple[float, float] | None:
    if len(comparison.contributions) < 2:
        return None
    return (
        sum(contribution.from_share for contribution in comparison.contributions),
        sum(contribution.from_accuracy for contribution in comparison.contributions),
    )


def _explain_split(comparison: Comparison) -> str:
    parts = _effect_totals(comparison)
    if parts is None:
        return "The environment recognized only one strategy, so the whole change is accuracy within it."
    share, accuracy = parts
    change = comparison.accuracy[1] - comparison.accuracy[0]
    text = (
        "A policy improves by choosing better strategies, or by becoming more accurate within a strategy. "
        f"From “{comparison.before_label}” to “{comparison.after_label}”, {format_points(share)} points came"
        f" from the choice of strategy and {format_points(accuracy)} from accuracy within strategies."
    )
    if abs(share + accuracy - change) > 0.0005:
        text += (
            f" Their sum is {format_points(share + accuracy)}, but pass@1 changed by {format_points(change)}:"
            " the parts count answers, pass@1 counts tasks, and tasks with failed verdicts have fewer"
            " answers."
        )
    return text


def _evaluation_headline(evaluation: Evaluation) -> Headline:
    mean, low, high = evaluation.measures["pass@1"]
    interval = ""
    if low is not None and high is not None:
        interval = f", 95% interval {format_percent(low)} to {format_percent(high)}"
    return Headline(
        f"pass@1 is {format_percent(mean)}{' before training' if evaluation.label == UNTRAINED else ''}",
        (f"On {evaluation.tasks} held-out tasks, {evaluation.samples} samples each{interval}.",),
    )


def _held_out_headline(trained: Training, *, is_over: bool) -> Headline | None:
    """Return the finding of evaluations during training: pass@1 of the first set at both ends."""
    figure = next(
        (name for name in trained.columns if name.startswith("eval/") and name.endswith("/pass@1")), None
    )
    if figure is None:
        return None
    keys = (figure, f"{figure}/low", f"{figure}/high")
    rows = [row for row in zip(*(trained.columns[key] for key in keys), strict=True) if None not in row]
    if len(rows) < 2:
        return None
    first, last = (" to ".join(map(format_percent, row[1:])) for row in (rows[0], rows[-1]))
    name, when = figure.split("/")[1], "at the end" if is_over else "so far"
    return Headline(
        f"pass@1 on {name} tasks went from {format_percent(rows[0][0])} to {format_percent(rows[-1][0])}",
        (f"{trained.description} 95% intervals: {first} before training, {last} {when}.",),
    )


def _curve_headline(trained: Training, *, is_over: bool) -> Headline | None:
    for name, label in (("reward", "Mean training reward"), ("loss", "Training loss")):
        values = [value for value in trained.columns.get(name, []) if value is not None]
        if len(values) > 1:
            edge = min(EDGE_STEPS, len(values) // 2)
            first, last = fmean(values[:edge]), fmean(values[-edge:])
            ends = f" Means of the first and last {edge}." if edge > 1 else ""
            status = "No checkpoint was evaluated on held-out tasks" + " yet" * (not is_over)
            rest = f"{status}, so this does not measure skill."
            return Headline(
                f"{label} went from {first:.3g} to {last:.3g}", (f"{trained.description}{ends} {rest}",)
            )
    return None


def format_percent(value: float, digits: int = 1) -> str:
    """Return a share in percent, with ties rounded up as in the browser."""
    return f"{math.nextafter(100 * value, math.inf):.{digits}f}%"


def format_points(value: float) -> str:
    """Return a difference of shares in percentage points, with its sign."""
    size = f"{abs(100 * value):.1f}"
    return size if size == "0.0" else f"{'−' if value < 0 else '+'}{size}"
