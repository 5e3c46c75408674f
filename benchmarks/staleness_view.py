"""Result page of the staleness benchmark: findings, a table and a chart from the records."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from comparison.chart import Curve, panels
from leads.text import count
from perilune.metrics.across_seeds import compare_over_seeds

DEFAULT = "tis"  # the default of `off_policy`
CHART = "staleness.svg"
CORRECTIONS = {
    "clip": "no correction: PPO's ratio compares the learner with the policy that sampled the token",
    "none": "the log-probs of the sampler are ignored, as if the learner's weights had sampled the tokens",
    "tis": "each token has its importance weight, truncated at 2 (the default)",
    "icepop": "each token has its importance weight; tokens with a weight below 0.5 or above 5 are left out",
    "sequence": "each token has the importance weight of its whole answer, truncated at 2",
    "vcpo": "as `sequence`, with a learning rate that falls with the effective sample size",
}
ABOUT = """\
In a run with staleness N, the weights from N steps earlier sample every token of a step. A schedule log fixes
this age.

The runs of a seed differ only in staleness and correction. Each starts from the same SFT checkpoint and
trains {steps} steps of {prompts} tasks x {samples} answers with {updates} updates per step. pass@1 is over
256 held-out tasks with eight answers each. Differences are tested [over paired
seeds](index.md#differences-over-seeds). We compare each staleness of `tis` with staleness 0, and each other
correction with `tis` at the same staleness."""

Record = Mapping[str, Any]
Cells = dict[tuple[int, str], dict[int, float]]
"""pass@1 by staleness and arm, then by seed."""


def view(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with its records replaced by findings, a table and a chart."""
    cells: Cells = {}
    for record in document["records"]:
        if "failed" not in record:
            cells.setdefault((record["staleness"], record["arm"]), {})[record["seed"]] = record["pass@1"]
    ages = sorted({age for age, _ in cells} - {0})
    arms = [arm for arm in CORRECTIONS if any(arm == other for _, other in cells)]
    text = [
        "\n".join(f"* {line}" for line in [*findings(cells, ages, arms), *stopped(document["records"])]),
        f"![pass@1 against staleness, one panel per correction]({CHART})",
    ]
    table = {
        f"`{arm}`": {
            "correction": CORRECTIONS[arm],
            **{f"staleness {age}": mean_and_range([*cells.get((age, arm), {}).values()]) for age in ages},
        }
        for arm in arms
    }
    rest = {key: document[key] for key in document if key not in ("settings", "arms", "records")}
    return {
        "title": "Pass rate by staleness and off-policy correction",
        "lead": lead(cells, ages, arms),
        "findings": "\n\n".join(text),
        "about": ABOUT.format(**document["settings"]),
        "command": document["command"],
        "pass@1 after training, mean and range over seeds": table,
        "charts": {CHART: panels(curves(cells, ages, arms), "staleness", "pass@1")},
        **rest,
    }


def lead(cells: Cells, ages: list[int], arms: list[str]) -> tuple[str, str]:
    """The corrections, and their pass rates without staleness and with the most."""
    oldest = {arm: fmean(cells[ages[-1], arm].values()) for arm in arms if (ages[-1], arm) in cells}
    best, worst = max(oldest, key=oldest.__getitem__), min(oldest, key=oldest.__getitem__)
    return (
        f"GRPO teaches a tiny model three-digit sums on tokens sampled by weights that are up to {ages[-1]} "
        f"steps old, with {count(len(arms), 'off-policy correction')}.",
        f"Mean pass@1 is {fmean(cells[0, DEFAULT].values()):.1%} without staleness; at staleness {ages[-1]} "
        f"it is {oldest[DEFAULT]:.1%} with the default correction `{DEFAULT}`, {oldest[best]:.1%} with "
        f"`{best}` ({CORRECTIONS[best]}), and {oldest[worst]:.1%} with `{worst}` ({CORRECTIONS[worst]}).",
    )


def findings(cells: Cells, ages: list[int], arms: list[str]) -> list[str]:
    """The effects of staleness and of the corrections."""
    questions = {
        f"staleness {age} against 0, both `{DEFAULT}`": ((age, DEFAULT), (0, DEFAULT)) for age in ages
    }
    questions |= {
        f"`{arm}` against `{DEFAULT}` at staleness {age}": ((age, arm), (age, DEFAULT))
        for age in ages
        for arm in arms
        if arm != DEFAULT
    }
    differences = {
        name: [
            cells[key][seed] - cells[other][seed] for seed in sorted(cells[key].keys() & cells[other].keys())
        ]
        for name, (key, other) in questions.items()
        if key in cells and other in cells
    }
    compared = compare_over_seeds({name: values for name, values in differences.items() if len(values) > 1})
    claimed = [
        f"{name}: {comparison.describe()}."
        for name, comparison in compared.items()
        if comparison.conclusion in ("higher", "lower")
    ]
    rest = f"No difference is shown in {len(compared) - len(claimed)} of {len(compared)} comparisons."
    return [*claimed, rest]


def mean_and_range(values: Sequence[float]) -> str:
    """The mean of some shares, with their range."""
    return f"{fmean(values):.1%} ({min(values):.1%} to {max(values):.1%})" if values else ""


def stopped(records: list[Record]) -> list[str]:
    """Sentences on the runs that a check stopped."""
    return [
        f"`{row['arm']}` at staleness {row['staleness']} stopped with seed {row['seed']}: {row['failed']}."
        for row in records
        if "failed" in row
    ]


def curves(cells: Cells, ages: list[int], arms: list[str]) -> dict[str, Curve]:
    """pass@1 of each arm by staleness. All curves begin at the value without staleness."""
    result = {}
    for arm in [DEFAULT, *(name for name in arms if name != DEFAULT)]:
        points = {0: [*cells[0, DEFAULT].values()]}
        points |= {age: [*cells[age, arm].values()] for age in ages if (age, arm) in cells}
        values = [(fmean(rates), min(rates), max(rates)) for rates in points.values()]
        x, (mean, low, high) = np.array([*points], float), np.array(values).T
        result[arm] = (x, mean, low, high)
    return result
