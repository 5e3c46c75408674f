"""Result page of the algorithm comparison: findings, tables and charts from the records.

Each arm is compared with the first arm of its setting, seed by seed. Holm's correction covers all comparisons
on the page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from leads.text import count, listed
from perilune.metrics.across_seeds import SeedComparison, compare_over_seeds, t_interval

from .chart import panels

WINDOW = 8  # steps in the average of a pass rate

Record = Mapping[str, Any]
Arms = dict[str, dict[int, Record]]  # by arm and seed
Comparisons = dict[tuple[str, str, str], SeedComparison]  # by setting, question and arm


@dataclass(frozen=True)
class Suite:
    """What the pages of two suites say differently.

    Attributes:
        name: the suite's file in benchmarks/comparison.
        start: where all arms of a seed start.
        about: a sentence or two about the arms.
        edges: sentences about best learning rates at the edge of the grid.
    """

    name: str
    title: str
    models: str
    start: str
    updates: str
    rates: str
    about: str = ""
    edges: str = ""


TINY = Suite(
    "algorithms",
    "RL algorithms compared on tiny models",
    "tiny models",
    "the same SFT checkpoint with a fresh optimizer",
    "four",
    "five",
    "The arm `process` is GRPO with process rewards. ",
)
SMOLLM2 = Suite(
    "algorithms_smollm2",
    "RL algorithms compared on SmolLM2-135M",
    "SmolLM2-135M-Instruct",
    "the instruct model",
    "two",
    "three",
    edges="""

For five of the eight arms, the best rate lies at the edge of the grid: for `cispo` at the lowest rate (1e-5),
and for `dapo`, `dgpo`, `maxrl` and `rloo` at the highest (4e-5). Rates outside of the grid might suit these
arms better.""",
)


def view(document: Mapping[str, Any], suite: Suite = TINY) -> dict[str, Any]:
    """The document with its records replaced by findings, tables and charts."""
    settings = {}
    for name, setting in document["settings"].items():
        arms = _arms(document["records"], name, list(setting["arms"]))
        if len(arms) > 1:
            settings[name] = arms
    compared = compare(settings)
    page: dict[str, Any] = {"title": suite.title, "command": document["command"]}
    text, charts = [], {}
    for name, arms in settings.items():
        title, picture = document["settings"][name]["title"], f"algorithms_{name}.svg"
        charts[picture] = _chart(arms)
        text += [
            f"**{title}**",
            "\n".join(f"* {sentence}" for sentence in findings(name, arms, compared)),
            f"![Pass rate against CPU seconds, one panel per arm]({picture})",
        ]
        rates = document.get("learning_rates", {}).get(name, {})
        page[title] = _tables(name, arms, compared, rates)
    rest = {
        key: value
        for key, value in document.items()
        if key not in (*page, "note", "settings", "records", "learning_rates")
    }
    if note := document.get("note"):
        text.append(f"**Note.** {note}")
    page |= {"lead": outcome(compared, suite), "findings": "\n\n".join(text), "about": measurement(suite)}
    return {**page, "charts": charts, **rest}


def measurement(suite: Suite) -> str:
    """The text on how a suite was measured."""
    return f"""\
An *arm* is one algorithm with its default options, except for the keys in
`benchmarks/comparison/{suite.name}.yaml`. {suite.about}All arms of a seed start from {suite.start}, and see
the same tasks in the same order. They train on the same number of episodes, with {suite.updates} optimizer
updates per batch of rollouts. (`dapo` also samples replacements for dead groups. It trains for fewer steps,
so that its number of episodes comes close to that of the others.) The learning rate of each arm is the best
of {suite.rates} on a further seed, which the comparison leaves out.{suite.edges}

* *At equal episodes*: pass@1 on held-out tasks after training, from eight answers per task.
* *At equal seconds*: the pass rate of each arm at the time when the fastest arm of the seed finishes. This
  rate is the mean over the last {WINDOW} steps that the arm has completed by then, on training tasks that are
  new at every step. Seconds are CPU seconds of the training process, without scoring and without the first
  step. Other programs can only increase the CPU time. So we take, for each arm and step, the lowest CPU time
  per episode of this step in any seed, and multiply it by the step's number of episodes.

Differences are tested [over paired seeds](index.md#differences-over-seeds). In the charts the line is the
mean over seeds, the band is the range, and the reference arm is gray."""


def outcome(compared: Comparisons, suite: Suite) -> tuple[str, str]:
    """Two sentences: the comparison, and its outcome."""
    settings = {setting for setting, _, _ in compared}
    verdicts = []
    for question, words in (("episodes", "the same number of episodes"), ("seconds", "the same CPU time")):
        found = [
            f"{conclusion} with {listed(arms)}"
            for conclusion in ("higher", "lower")
            if (arms := _concluded(compared, question, conclusion))
        ]
        if found:
            verdicts.append(f"after {words}, {' and '.join(found)}")
    return (
        f"RL with {len({arm for _, _, arm in compared})} algorithms and variants is compared with GRPO on"
        f" {suite.models}, in {count(len(settings), 'setting')}.",
        f"Pass rates differ significantly from GRPO's in at least one setting: {'; '.join(verdicts)}."
        if verdicts
        else "In no setting does a pass rate differ significantly from GRPO's.",
    )


def _concluded(compared: Comparisons, question: str, conclusion: str) -> list[str]:
    """The arms with this conclusion in at least one setting."""
    return sorted(
        {
            f"`{arm}`"
            for (_, asked, arm), result in compared.items()
            if (asked, result.conclusion) == (question, conclusion)
        }
    )


def compare(settings: Mapping[str, Arms]) -> Comparisons:
    """Compare every arm with the first arm of its setting, for each of three questions."""
    questions = {"episodes": at_equal_episodes, "seconds": at_equal_seconds, "tokens": change_of_length}
    differences = {
        (name, question, arm): values
        for name, arms in settings.items()
        for question, ask in questions.items()
        for arm, values in ask(arms).items()
    }
    return compare_over_seeds(differences)


def findings(setting: str, arms: Arms, compared: Comparisons) -> list[str]:
    """The result of the first arm, the claimed differences, and the smallest visible difference."""
    base, *others = arms
    start = fmean(record["before"]["pass@1"]["mean"] for record in arms[base].values())
    reached = fmean(record["pass@1"]["mean"] for record in _done(arms, base).values())
    sentences = [
        f"`{base}` goes from {start:.1%} pass@1 before RL to {reached:.1%} after it, on average over"
        f" {len(arms[base])} seeds."
    ]
    for arm in others:
        if stopped := [str(seed) for seed, record in arms[arm].items() if "failed" in record]:
            sentences.append(f"`{arm}` was stopped by a check with seed {', '.join(stopped)}.")
    for question in ("episodes", "seconds"):
        tested = {arm: entry for arm in others if (entry := compared.get((setting, question, arm)))}
        sentences += [
            f"`{arm}` against `{base}` at equal {question}: {entry.describe()}."
            for arm, entry in tested.items()
            if entry.conclusion != "no difference shown"
        ]
        if rest := [f"`{arm}`" for arm, entry in tested.items() if entry.conclusion == "no difference shown"]:
            sentences.append(f"No difference from `{base}` shown at equal {question}: {', '.join(rest)}.")
    sentences += [
        f"Tokens per answer of `{arm}` against `{base}`: {entry.conclusion} ({entry.mean:+.1%}, 95% interval "
        f"{entry.low:+.1%} to {entry.high:+.1%}; corrected p = {entry.p_corrected:.2g})."
        for arm in others
        if (entry := compared.get((setting, "tokens", arm)))
    ]
    widths = [
        (entry.high - entry.low) / 2
        for (name, kind, _), entry in compared.items()
        if (name, kind) == (setting, "episodes")
    ]
    bounds = " to ".join(dict.fromkeys(f"{100 * width:.1f}" for width in (min(widths), max(widths))))
    sentences.append(
        "The comparison cannot show small differences: at equal episodes, the 95% interval of an arm"
        f" extends {bounds} points to each side of its mean difference."
    )
    return sentences


def at_equal_episodes(arms: Arms) -> dict[str, list[float]]:
    """Difference of pass@1 from the first arm: by arm, one value per seed."""
    base, *others = arms
    return {
        arm: [record["pass@1"]["mean"] - other["pass@1"]["mean"] for other, record in pairs.values()]
        for arm in others
        if (pairs := _pairs(arms, base, arm))
    }


def at_equal_seconds(arms: Arms) -> dict[str, list[float]]:
    """Difference of the pass rate from the first arm at the end of the fastest arm of the seed.

    By arm, one value per seed.
    """
    base, *others = arms
    budget = seconds(arms)
    return {
        arm: [
            rate_at(record["curve"], budget[seed]) - rate_at(other["curve"], budget[seed])
            for seed, (other, record) in pairs.items()
        ]
        for arm in others
        if (pairs := _pairs(arms, base, arm))
    }


def change_of_length(arms: Arms) -> dict[str, list[float]]:
    """Relative change of tokens per answer, by arm that is meant to shorten answers, one value per seed."""
    base = next(iter(arms))
    return {
        arm: [record["length"] / other["length"] - 1 for other, record in pairs.values()]
        for arm in arms
        if arm == "toggle" and (pairs := _pairs(arms, base, arm))
    }


def seconds(arms: Arms) -> dict[int, float]:
    """CPU seconds of the fastest arm of each seed."""
    base = next(iter(arms))
    return {
        seed: min(done[seed]["curve"]["seconds"][-1] for arm in arms if seed in (done := _done(arms, arm)))
        for seed in _done(arms, base)
    }


def rate_at(curve: Mapping[str, Sequence[float]], budget: float) -> float:
    """Share of right answers in the last `WINDOW` steps that ended within the budget."""
    over = max(1, sum(time <= budget + 1e-9 for time in curve["seconds"]))
    part = slice(max(0, over - WINDOW), over)
    return float(np.average(curve["pass_rate"][part], weights=curve["episodes"][part]))


def _tables(
    setting: str, arms: Arms, compared: Comparisons, rates: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    base = next(iter(arms))
    done = {arm: _done(arms, arm) for arm in arms}
    order = sorted(
        (arm for arm in arms if done[arm]),
        key=lambda arm: -fmean(record["pass@1"]["mean"] for record in done[arm].values()),
    )
    tables: dict[str, Any] = {
        "after training": [
            {
                "arm": f"`{arm}`",
                "pass@1, % (95% interval over seeds)": _percent(t_interval(_values(done[arm], "pass@1"))),
                "pass@8, % (median, min to max)": _range(_values(done[arm], "pass@8"), 100),
                "greedy, % (median, min to max)": _range(_values(done[arm], "greedy"), 100),
                "tokens per answer": _range([run["length"] for run in done[arm].values()]),
                "episodes": _range([sum(run["curve"]["episodes"]) for run in done[arm].values()], digits=0),
                "CPU seconds": _range([run["curve"]["seconds"][-1] for run in done[arm].values()]),
            }
            for arm in order
        ]
    }
    for question in ("episodes", "seconds"):
        tables[f"against {base} at equal {question}"] = [
            {
                "arm": f"`{arm}`",
                "difference, points": f"{100 * entry.mean:+.1f}",
                "95% interval": f"{100 * entry.low:+.1f} to {100 * entry.high:+.1f}",
                "by seed": ", ".join(f"{100 * value:+.1f}" for value in entry.differences),
                "p": entry.p,
                "corrected p": entry.p_corrected,
            }
            for arm in order
            if (entry := compared.get((setting, question, arm))) is not None
        ]
    if rates:
        tables["pass@1 in % by learning rate, on the seed that only serves to choose the rate"] = [
            {"arm": f"`{arm}`", **{rate: f"{100 * reached:.1f}" for rate, reached in tried.items()}}
            for arm, tried in rates.items()
        ]
    return tables


def _values(runs: Mapping[int, Record], name: str) -> list[float]:
    return [run[name]["mean"] for run in runs.values()]


def _percent(found: Mapping[str, float]) -> str:
    """A share with its interval in percent, clipped to 0 and 100."""
    mean, low, high = (100 * min(1.0, max(0.0, found[name])) for name in ("mean", "low", "high"))
    return f"{mean:.1f} ({low:.1f} to {high:.1f})"


def _range(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """Median, minimum and maximum, or one figure if they agree."""
    texts = [f"{scale * value:,.{digits}f}" for value in (median(values), min(values), max(values))]
    return texts[0] if len(set(texts)) == 1 else f"{texts[0]} ({texts[1]} to {texts[2]})"


def _chart(arms: Arms) -> str:
    curves = {}
    for arm in arms:
        runs = [_smooth(record["curve"]) for record in _done(arms, arm).values()]
        if not runs:
            continue
        grid = np.linspace(max(x[0] for x, _ in runs), min(x[-1] for x, _ in runs), 60)
        values = np.array([np.interp(grid, x, y) for x, y in runs])
        curves[arm] = (grid, values.mean(0), values.min(0), values.max(0))
    return panels(curves, x="CPU seconds", y="pass rate")


def _smooth(curve: Mapping[str, Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds at the end of each step, and the pass rate over the last `WINDOW` steps."""
    times = np.array(curve["seconds"])
    return times, np.array([rate_at(curve, time) for time in times])


def _arms(records: Sequence[Record], setting: str, order: Sequence[str]) -> Arms:
    by_arm: Arms = {arm: {} for arm in order}
    for record in records:
        if record["setting"] == setting and record["arm"] in by_arm:
            by_arm[record["arm"]][record["seed"]] = record
    return {arm: _priced(runs) for arm, runs in by_arm.items() if runs}


def _priced(runs: Mapping[int, Record]) -> dict[int, Record]:
    """Runs of one arm, with the seconds from the end of the first step to the end of each step.

    An episode of a step has its lowest CPU time of all seeds, because other load on the machine can only
    add to the CPU time of a process.
    """
    curves = {seed: run["curve"] for seed, run in runs.items() if "failed" not in run}
    costs = [np.diff(curve["processor"]) / curve["episodes"][1:] for curve in curves.values()]
    least = np.min(costs, axis=0) if costs else np.zeros(0)
    priced = {}
    for seed, curve in curves.items():
        times = np.concatenate([[0.0], np.cumsum(least * curve["episodes"][1:])])
        priced[seed] = {**runs[seed], "curve": {**curve, "seconds": times.tolist()}}
    return {**runs, **priced}


def _done(arms: Arms, arm: str) -> dict[int, Record]:
    return {seed: run for seed, run in sorted(arms[arm].items()) if "failed" not in run}


def _pairs(arms: Arms, base: str, arm: str) -> dict[int, tuple[Record, Record]]:
    """Records (first arm, this arm) by seed, if both finished."""
    own, reference = _done(arms, arm), _done(arms, base)
    return {seed: (reference[seed], own[seed]) for seed in own if seed in reference}
