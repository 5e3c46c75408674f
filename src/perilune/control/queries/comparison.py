"""Compare experiments: the settings that differ, final figures, and paired differences with their intervals.

Experiments that differ only in their seed are one arm. Differences over seeds support claims about settings;
differences over the tasks of single runs only support claims about these checkpoints.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from perilune.control.queries.lookup import (
    StageStatus,
    find_experiments,
    group_stage_statuses,
    stage_statuses,
)
from perilune.control.runs.experiments import Control
from perilune.control.runs.sweeps import find_sweep
from perilune.errors import RequestError, UnknownNameError
from perilune.files import canonical_json, read_json
from perilune.metrics.across_seeds import MIN_SEEDS, SeedComparison, compare_over_seeds, t_interval
from perilune.metrics.bootstrap import Interval, bootstrap_problems
from perilune.plural import plural

ABSENT_SETTING = "–"  # the value of a setting that an arm does not have
DEFAULT_FIGURE = "pass@1"
MAX_LABEL_CHARS = 60  # characters; a longer label is replaced by the name and a number
# The main figures of a training without an evaluation.
TRAINING_FIGURES = ("validation_accuracy", "reward", "accuracy", "validation_loss", "loss")
SHARE_PREFIXES = (
    *("pass@", "pass_rate", "greedy", "accuracy", "validation_accuracy", "truncated"),
    *("share", "format", "live_groups", "dead_groups"),
)
LOWER_IS_BETTER = (
    *("loss", "length", "truncated", "seconds", "perplexity", "kl"),
    *("failures", "dead_groups", "exploitability"),
)


@dataclass(frozen=True, slots=True)
class Member:
    """One experiment of an arm.

    Attributes:
        figure: its final figure; None if it has none, for the reason in `problem`.
        tasks: the pass rate of each task, if the figure is the mean of these.
    """

    experiment: str
    seed: int
    stages: tuple[StageStatus, ...]
    figure: Interval | None
    tasks: Mapping[str, float]
    problem: str = ""

    @property
    def has_succeeded(self) -> bool:
        return all(stage.state == "succeeded" for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Difference:
    """Final figure of an arm minus that of the baseline, over the seeds that both have.

    Attributes:
        seeds: the paired test over seeds, corrected for the number of arms.
        tasks: mean over the tasks of these seeds, with an interval over tasks; None if it is not pass@1.
        task_count: number of tasks that both were evaluated on.
    """

    seeds: SeedComparison
    tasks: Interval | None
    task_count: int


@dataclass(frozen=True, slots=True)
class Arm:
    """Experiments with the same settings.

    Attributes:
        settings: the values of the settings that differ between arms.
        figure: mean of the final figure. With several seeds the interval is over seeds, with one over tasks.
        difference: from the baseline; None for the baseline itself, and without common seeds.
    """

    label: str
    settings: Mapping[str, Any]
    members: tuple[Member, ...]
    figure: Interval | None
    difference: Difference | None = None

    @property
    def finished_members(self) -> dict[int, Member]:
        """The members with a final figure, by seed."""
        return {member.seed: member for member in self.members if member.figure is not None}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Arms compared by one final figure.

    Attributes:
        metric: "stage.figure".
        keys: the settings that differ.
        baseline: position of the arm that the others are compared with.
    """

    title: str
    metric: str
    keys: tuple[str, ...]
    arms: tuple[Arm, ...]
    baseline: int

    @property
    def is_share(self) -> bool:
        return is_share(self.metric)

    @property
    def maximize(self) -> bool:
        """True if a higher figure is better."""
        return not lower_is_better(self.metric)

    @property
    def best(self) -> int | None:
        """Position of the arm with the best final figure; None for fewer than two figures, and for a tie."""
        known = {index: arm.figure.mean for index, arm in enumerate(self.arms) if arm.figure is not None}
        target = (max if self.maximize else min)(known.values(), default=None)
        best = [index for index, figure in known.items() if figure == target]
        return best[0] if len(best) == 1 < len(known) else None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what the figures show, and what they do not show."""
        return tuple(_make_notes(self))


def is_share(metric: str) -> bool:
    """Return whether a figure is a share, by its name."""
    return metric.rpartition(".")[2].startswith(SHARE_PREFIXES)


def lower_is_better(metric: str) -> bool:
    """Return whether a lower figure is better, by its name: losses, lengths, times, failures and others."""
    return any(word in metric.rpartition(".")[2] for word in LOWER_IS_BETTER)


def compare_experiments(
    control: Control, references: Sequence[str], *, metric: str | None = None, baseline: int = 0
) -> Comparison:
    """Compare experiments, and all experiments of sweeps, given by name or id.

    Args:
        metric: the final figure, "stage.figure". Default: that of the sweep, else pass@1 of the last
            evaluation, else the main figure of the last training.
        baseline: position of the arm that the others are compared with.

    Raises:
        RequestError: a reference, the figure or the baseline is unknown.
    """
    sweeps = [sweep for name in references if (sweep := find_sweep(control, name)) is not None]
    ids = list(dict.fromkeys(key for name in references for key in _find_experiments(control, name)))
    documents = {key: _read_recipe(control.home.experiment(key) / "recipe.json") for key in ids}
    stages = group_stage_statuses(control, ids)
    metric = metric or next((item.metric for item in sweeps if item.metric), None) or _default_metric(stages)
    check_metric(metric, (status.name for statuses in stages.values() for status in statuses))
    arms = _keep_differing_settings(_group_arms(documents, stages, metric))
    members = [member for arm in arms for member in arm.members]
    if all(member.figure is None and member.has_succeeded for member in members):
        raise RequestError(members[0].problem, where=f"--metric {metric}")
    if not 0 <= baseline < len(arms):
        where, remedy = f"--baseline {baseline + 1}", f"give a number from 1 to {len(arms)}"
        raise RequestError(f"there are only {len(arms)} arms", where=where, remedy=remedy)
    names = [sweep.name for sweep in sweeps] or dict.fromkeys(recipe["name"] for recipe in documents.values())
    arms = _add_differences(arms, baseline)
    return Comparison(", ".join(names), metric, tuple(arms[0].settings), tuple(arms), baseline)


def check_metric(metric: str, stages: Iterable[str]) -> None:
    """Check that a metric is "stage.figure" with one of the stages.

    Raises:
        RequestError: when there is no such stage, or no figure.
    """
    known = dict.fromkeys(stages)
    stage, _, figure = metric.partition(".")
    if stage not in known or not figure:
        remedy = f"STAGE.METRIC with one of the stages {', '.join(known)}"
        what = (
            f"no metric of the stage {stage} is named" if stage in known else f"no stage is called '{stage}'"
        )
        raise RequestError(what, where=f"--metric {metric}", remedy=remedy)


def describe_unseen_metric(control: Control, recipe: str, metric: str) -> str:
    """Return a warning if no finished run of the metric's stage has it, in experiments named `recipe`.

    Return "" if one has it, or none has finished: figures depend on the task and its settings.
    """
    stage = metric.partition(".")[0]
    with suppress(UnknownNameError):
        statuses = stage_statuses(control, find_experiments(control, recipe))
        finished = [[row] for row in statuses if row.name == stage and row.state == "succeeded"]
        if finished and not any(_read_figure(row, metric) for row in finished):
            known = _list_figures(finished[-1], metric)
            return f"no finished run of {recipe}/{stage} has the figure {metric}{known}"
    return ""


def final_figures(
    control: Control, experiments: Iterable[str], metric: str | None = None
) -> tuple[str, dict[str, float]]:
    """Return the final figure and its name, by experiment; experiments without it are left out."""
    stages = group_stage_statuses(control, list(experiments))
    metric = metric or _default_metric(stages)
    figures = {experiment: _read_figure(statuses, metric) for experiment, statuses in stages.items()}
    return metric, {experiment: figure.mean for experiment, figure in figures.items() if figure is not None}


def _find_experiments(control: Control, name: str) -> list[str]:
    sweep = find_sweep(control, name)
    if sweep is None:
        return find_experiments(control, name)
    ids = [key for arm in sweep.arms for key in arm.experiments.values()]
    # An experiment that was removed has no recipe.
    return [key for key in ids if (control.home.experiment(key) / "recipe.json").exists()]


def _default_metric(stages: Mapping[str, Sequence[StageStatus]]) -> str:
    """Return pass@1 of the last evaluation, else the main figure of the last training.

    Of several, the stage that most experiments have counts, finished or not.
    """
    common = Counter(status.name for statuses in stages.values() for status in statuses)
    for wanted in ("evaluation", "training"):
        figures = [
            (common[status.name], position, figure)
            for statuses in stages.values()
            for position, status in enumerate(statuses)
            if status.summary.get("kind") == wanted and (figure := _main_figure(status))
        ]
        if figures:
            return max(figures, key=lambda found: found[:2])[2]
    final = next(iter(stages.values()))[-1]
    return f"{final.name}.{DEFAULT_FIGURE}"  # nothing has finished yet


def _main_figure(status: StageStatus) -> str:
    if status.summary["kind"] == "evaluation":
        return f"{status.name}.{DEFAULT_FIGURE}"
    last = status.summary.get("last") or {}
    name = next((figure for figure in TRAINING_FIGURES if figure in last), "")
    return name and f"{status.name}.last.{name}"


def _read_figure(stages: Sequence[StageStatus], metric: str) -> Interval | None:
    name, *path = metric.split(".")
    value: Any = next((stage.summary for stage in stages if stage.name == name), {})
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping) and "mean" in value:
        return Interval(value["mean"], value.get("low", math.nan), value.get("high", math.nan))
    return Interval(float(value), math.nan, math.nan) if isinstance(value, int | float) else None


def _list_figures(stages: Sequence[StageStatus], metric: str) -> str:
    """Return the names of the figures of the metric's stage, as the end of a message."""
    name = metric.partition(".")[0]
    summary = next((stage.summary for stage in stages if stage.name == name), {})
    keys = [*summary, *(f"last.{key}" for key in summary.get("last") or {})]
    known = ", ".join(key for key in keys if _read_figure(stages, f"{name}.{key}"))
    return f"; {name} has {known}" if known else ""


def _read_recipe(path: Path) -> dict[str, Any]:
    document = read_json(path)
    try:
        _flatten_recipe(document)
        return {**document, "name": str(document["name"]), "seed": int(document["seed"])}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RequestError("not the recipe of an experiment", where=str(path)) from None


def _flatten_recipe(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a resolved recipe by the keys that `--set` takes; without its name and seed."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if key not in {"name", "seed", "stages"}:
            flat |= _flatten(value, key)
    for stage in document["stages"]:
        parts = {"task": stage["task"], "environment": stage.get("environment") or {}, **stage["spec"]}
        flat |= _flatten(parts, str(stage["name"]))
    return flat


def _flatten(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {key: value}
    return {
        name: leaf for inner, part in value.items() for name, leaf in _flatten(part, f"{key}.{inner}").items()
    }


def _group_arms(
    documents: Mapping[str, Mapping[str, Any]], stages: Mapping[str, Sequence[StageStatus]], metric: str
) -> list[Arm]:
    """Group experiments that differ only in their seed."""
    groups: dict[bytes, list[str]] = {}
    for experiment, document in documents.items():
        groups.setdefault(canonical_json({**document, "seed": 0}), []).append(experiment)
    arms = []
    for group in groups.values():
        members = tuple(
            _make_member(experiment, documents[experiment]["seed"], stages[experiment], metric)
            for experiment in sorted(group, key=lambda experiment: documents[experiment]["seed"])
        )
        figures = [member.figure for member in members if member.figure is not None]
        figure = figures[0] if figures else None
        if len(figures) > 1:
            figure = Interval(**t_interval([figure.mean for figure in figures]))
        arms.append(Arm(documents[group[0]]["name"], _flatten_recipe(documents[group[0]]), members, figure))
    return arms


def _make_member(experiment: str, seed: int, stages: Sequence[StageStatus], metric: str) -> Member:
    figure, problem = _read_figure(stages, metric), ""
    if figure is None:
        problem = f"there is no figure {metric}{_list_figures(stages, metric)}"
        if stage := next((status for status in stages if status.state != "succeeded"), None):
            cause = (stage.message or stage.cause).partition("\n")[0]
            problem = f"{stage.name} is {stage.display_state}" + (f": {cause}" if cause else "")
    name, _, measure = metric.partition(".")
    summary = (
        next((row.summary for row in stages if row.name == name), {}) if measure == DEFAULT_FIGURE else {}
    )
    rows = summary.get("correct_per_task") or ()
    tasks = {str(task): right / samples for task, samples, right in rows}
    return Member(experiment, seed, tuple(stages), figure, tasks, problem)


def _keep_differing_settings(arms: Sequence[Arm]) -> list[Arm]:
    """Return the arms with only the settings that differ, and labels made of them."""
    every = dict.fromkeys(key for arm in arms for key in arm.settings)
    keys = [
        key
        for key in every
        if len({canonical_json(arm.settings.get(key, ABSENT_SETTING)) for arm in arms}) > 1
    ]
    keys = [key for key in keys if not _is_detail(key, keys, arms)]
    labelled = []
    for number, arm in enumerate(arms, start=1):
        settings = {key: arm.settings.get(key, ABSENT_SETTING) for key in keys}
        label = ", ".join(f"{key}={_format_setting(value)}" for key, value in settings.items())
        if not label or len(label) > MAX_LABEL_CHARS:
            label = f"{arm.label} ({number})"
        labelled.append(replace(arm, label=label, settings=settings))
    return labelled


def _is_detail(key: str, differing: Sequence[str], arms: Sequence[Arm]) -> bool:
    """Return whether a key adds nothing, as its stage is missing in an arm or its environment differs."""
    part, _, name = key.rpartition(".")
    if part.partition(".")[0] == "environment":
        return "environment.id" in differing and key not in ("environment.id", "environment.task")
    task = f"{key.partition('.')[0]}.task"
    return name != "task" and task in differing and any(task not in arm.settings for arm in arms)


def _format_setting(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def format_settings(arm: Arm) -> list[str]:
    """Return the settings that differ as short texts."""
    return [_format_setting(value) for value in arm.settings.values()]


def describe_difference(difference: Difference, *, is_share: bool) -> str:
    """Return the difference as text: over seeds if there are enough, else over tasks without a claim."""
    if len(difference.seeds.differences) >= MIN_SEEDS or difference.tasks is None:
        return difference.seeds.describe(is_share=is_share)
    mean, low, high = (f"{100 * value:+.1f}" for value in difference.tasks)
    few = f"{plural(len(difference.seeds.differences), 'seed')}: no claim"
    return f"{mean} points ({low} to {high} over {difference.task_count} tasks; {few})"


def _add_differences(arms: Sequence[Arm], baseline: int) -> list[Arm]:
    """Return the arms with their differences from the baseline; all of them are corrected together."""
    base = _figures(arms[baseline])
    by_seed: dict[str, list[float]] = {}
    for index, arm in enumerate(arms):
        figures = _figures(arm)
        if index != baseline and (seeds := sorted(base.keys() & figures.keys())):
            by_seed[str(index)] = [figures[seed] - base[seed] for seed in seeds]
    tests = compare_over_seeds(by_seed)
    return [
        replace(arm, difference=Difference(tests[str(index)], *_difference_over_tasks(arms[baseline], arm)))
        if str(index) in tests
        else arm
        for index, arm in enumerate(arms)
    ]


def _figures(arm: Arm) -> dict[int, float]:
    return {member.seed: member.figure.mean for member in arm.members if member.figure is not None}


def _difference_over_tasks(before: Arm, after: Arm) -> tuple[Interval | None, int]:
    """Return the mean difference of the pass rates by task over common seeds, and the number of tasks."""
    earlier, later = before.finished_members, after.finished_members
    differences: dict[str, list[float]] = {}
    for seed in sorted(earlier.keys() & later.keys()):
        old, new = earlier[seed].tasks, later[seed].tasks
        for task in sorted(old.keys() & new.keys()):
            differences.setdefault(task, []).append(new[task] - old[task])
    if not differences:
        return None, 0
    means = {task: fmean(values) for task, values in differences.items()}
    return bootstrap_problems(list(means.values())), len(means)


def _make_notes(comparison: Comparison) -> Iterator[str]:
    for arm in comparison.arms:
        for member in arm.members:
            if member.problem:
                yield f"{arm.label}, seed {member.seed} has no final figure: {member.problem}."
    pairs = [len(arm.difference.seeds.differences) for arm in comparison.arms if arm.difference is not None]
    if len(comparison.arms) > 1 and not pairs:
        yield (
            "No arm has a figure for a seed of the baseline, so nothing is paired. Run all arms on the same"
            " seeds."
        )
    elif pairs and min(pairs) < MIN_SEEDS:
        yield (
            f"With fewer than {MIN_SEEDS} common seeds, no claim about the settings is possible: another seed"
            " may reverse the order. Intervals over tasks say which of these checkpoints is better on such"
            " tasks."
        )
    base = comparison.arms[comparison.baseline]
    for arm in comparison.arms:
        has_tasks = any(member.tasks for member in arm.members) and any(item.tasks for item in base.members)
        if arm.difference is not None and has_tasks and not arm.difference.task_count:
            yield (
                f"{arm.label} and {base.label} were evaluated on different tasks: the difference of their"
                " figures does not say which model is better."
            )
    if comparison.best is None:
        return
    better = "highest" if comparison.maximize else "lowest"
    yield (
        f"{comparison.arms[comparison.best].label} has the {better} figure of {len(comparison.arms)} arms."
        " The best of several noisy figures is biased: expect a worse figure on new tasks. For an unbiased"
        " figure, run this arm and the baseline on seeds that had no part in the choice."
    )
    if edge := _describe_edge(comparison):
        yield f"The best arm has the {edge} that was tried. A better value may lie beyond it."
    if _repeats_tasks(comparison.arms[comparison.best]):
        yield (
            "Here different seeds were evaluated on mostly the same held-out tasks, so new seeds alone do not"
            " remove this bias. Evaluate the chosen checkpoint on tasks that no arm was evaluated on."
        )


def _describe_edge(comparison: Comparison) -> str:
    """Return the settings of which the best arm has the lowest or highest of at least three numbers."""
    assert comparison.best is not None
    edges = []
    for key in comparison.keys:
        values = [arm.settings.get(key) for arm in comparison.arms]
        numbers = {item for item in values if isinstance(item, int | float) and not isinstance(item, bool)}
        if len(numbers) >= 3 and len(numbers) == len(set(map(repr, values))):
            best = comparison.arms[comparison.best].settings[key]
            edges += [f"lowest {key}"] * (best == min(numbers)) + [f"highest {key}"] * (best == max(numbers))
    return " and ".join(edges)


def _repeats_tasks(arm: Arm) -> bool:
    """Return whether different seeds were evaluated on mostly the same tasks, as with a small task file."""
    first, *others = [set(member.tasks) for member in arm.members if member.tasks] or [set()]
    return any(len(first & other) > len(first) / 2 for other in others)
