"""What the page shows of the arms' records: tables, curves, and in words which differences are noise.

Seeds are the unit: an arm is compared with the first arm of its setting seed by seed, and the interval is
Student's over seeds. Holm's correction is for the arms of one setting and one question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from perilune.metrics.bootstrap import paired_difference

from .across_seeds import holm, interval, p_value
from .chart import panels

WINDOW = 8  # steps whose pass rate is averaged where a curve is read
SAMPLES = 8  # answers to a held-out task
FEWEST = 3  # pairs from which on a verdict is given
CLEAR = 0.05  # a corrected p value below it is a difference

Record = Mapping[str, Any]
Arms = dict[str, dict[int, Record]]  # by arm and seed


def view(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with its records as tables, with verdicts and charts."""
    shown: dict[str, Any] = {"title": "The algorithms compared", "command": document["command"]}
    about, charts = [ABOUT], {}
    compared: list[Arms] = []
    for name, setting in document["settings"].items():
        arms = _arms(document["records"], name, list(setting["arms"]))
        if len(arms) < 2:
            continue
        compared.append(arms)
        picture = f"algorithms_{name}.svg"
        charts[picture] = _chart(arms)
        about += [
            f"**{setting['title']}**",
            "\n".join(f"* {one}" for one in findings(arms)),
            f"![Pass rate against processor seconds, an arm a panel]({picture})",
        ]
        shown[setting["title"]] = _tables(arms)
    about += together(compared)
    rest = {key: value for key, value in document.items() if key not in (*shown, "settings", "records")}
    return {**shown, "about": "\n\n".join(about), "charts": charts, **rest}


ABOUT = f"""\
Every arm of a seed starts from the same cold start, is given the same training tasks in the same order, has
as many episodes (`dapo` about as many: its refills decide), the same learning rate, and four updates a batch,
so that clips and ratios matter. Then it answers the same held-out tasks, eight times each. The learning rate
was chosen for `grpo`, on a seed that is not shown: an arm that is worse may only want another (`dr_grpo_2x`
has twice that rate). All other options are the defaults.

* *At equal episodes* compares pass@1 on the held-out tasks.
* *At equal seconds* compares pass rates on training tasks, new at every step, over the last {WINDOW} steps
  before the quickest arm of the seed had spent its episodes. Seconds are the processor's from the end of the
  first step on: waiting for others is not in them, and judging is not, which costs each answer the same. Each
  step of an arm is priced at the least an episode took in any seed, since a busy machine adds to that too.

An interval over seeds is Student's, of differences between arms of one seed: what another cold start, other
tasks and other draws change is in it. The intervals of single seeds resample held-out tasks, and say nothing
of that. The arms of a setting are tested together (Holm): *better* and *worse* are said where the corrected
p is below {CLEAR:g}. In the panels the line is the mean of the seeds, the band goes from the least to the
most, and grey is the arm that the others are compared with."""


def findings(arms: Arms) -> list[str]:
    """One sentence an arm and question, and what the seeds could have shown."""
    base, *others = arms
    seeds = len(arms[base])
    start = interval([one["before"]["pass@1"]["mean"] for one in arms[base].values()])["mean"]
    reached = interval([one["pass@1"]["mean"] for one in _done(arms, base).values()])["mean"]
    said = [f"`{base}` climbs from {start:.1%} to {reached:.1%} on average over {seeds} seeds."]
    episodes, seconds = at_equal_episodes(arms), at_equal_seconds(arms)
    for arm in others:
        stopped = [str(seed) for seed, one in arms[arm].items() if "failed" in one]
        if stopped:
            said.append(f"`{arm}` did not come to its end with seed {', '.join(stopped)}.")
        if arm in episodes:
            said.append(
                f"`{arm}` against `{base}` at equal episodes: {_told(arm, episodes)}. "
                f"At equal seconds: {_told(arm, seconds)}."
            )
            said += _shorter(arms, base, arm)
    widths = [(one["high"] - one["low"]) / 2 for one in map(interval, episodes.values())]
    said.append(
        f"What {seeds} seeds can show: the intervals at equal episodes reach {100 * min(widths):.1f} to "
        f"{100 * max(widths):.1f} points to either side, before any correction."
    )
    return said


def together(compared: Sequence[Arms]) -> list[str]:
    """What the tasks with many arms say together: more evidence, still one test an arm and question."""
    shared = [arms for arms in compared if len(arms) > 2]
    if len(shared) < 2:
        return []
    sentences = []
    questions = {"episodes": at_equal_episodes, "seconds": at_equal_seconds}
    told = {question: _joined([ask(arms) for arms in shared]) for question, ask in questions.items()}
    for arm in told["episodes"]:
        found = (f"at equal {question} {_told(arm, joined)}" for question, joined in told.items())
        sentences.append(f"* `{arm}`: {'; '.join(found)}.")
    return ["**Both tasks together**, each seed of each task a pair", "\n".join(sentences)]


def _joined(tasks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    arms = [arm for arm in tasks[0] if all(arm in task for task in tasks)]
    return {arm: [value for task in tasks for value in task[arm]] for arm in arms}


def _told(arm: str, differences: Mapping[str, Sequence[float]]) -> str:
    found = interval(differences[arm])
    figures = " to ".join(f"{100 * found[end]:+.1f}" for end in ("low", "high"))
    corrected = holm({name: p_value(values) for name, values in differences.items()})[arm]
    if len(differences[arm]) < FEWEST:
        verdict = "too few seeds to say anything"
    elif corrected < CLEAR:
        verdict = "better" if found["mean"] > 0 else "worse"
    elif all(value > 0 for value in differences[arm]) or all(value < 0 for value in differences[arm]):
        way = "higher" if found["mean"] > 0 else "lower"
        verdict = f"{way} every time, but not clear of noise after the correction"
    else:
        verdict = f"no difference that {len(differences[arm])} pairs could show"
    return f"{verdict} ({100 * found['mean']:+.1f} points, {figures})"


def _shorter(arms: Arms, base: str, arm: str) -> list[str]:
    """What an arm that is meant to make answers shorter does to their length."""
    if arm != "toggle":
        return []
    pairs = _pairs(arms, base, arm)
    cut = interval([1 - one["length"] / other["length"] for other, one in pairs.values()])
    return [f"`{arm}` writes {cut['mean']:.1%} fewer tokens ({cut['low']:.1%} to {cut['high']:.1%})."]


def at_equal_episodes(arms: Arms) -> dict[str, list[float]]:
    """pass@1 less that of the first arm, a seed, by arm."""
    base, *others = arms
    return {
        arm: [one["pass@1"]["mean"] - other["pass@1"]["mean"] for other, one in pairs.values()]
        for arm in others
        if (pairs := _pairs(arms, base, arm))
    }


def at_equal_seconds(arms: Arms) -> dict[str, list[float]]:
    """Pass rate less that of the first arm when the quickest arm of the seed was done, a seed, by arm."""
    base, *others = arms
    budget = seconds(arms)
    return {
        arm: [
            rate_at(one["curve"], budget[seed]) - rate_at(other["curve"], budget[seed])
            for seed, (other, one) in pairs.items()
        ]
        for arm in others
        if (pairs := _pairs(arms, base, arm))
    }


def seconds(arms: Arms) -> dict[int, float]:
    """Processor seconds after which the quickest arm of a seed had spent its episodes."""
    base = next(iter(arms))
    return {
        seed: min(done[seed]["curve"]["seconds"][-1] for arm in arms if seed in (done := _done(arms, arm)))
        for seed in _done(arms, base)
    }


def rate_at(curve: Mapping[str, Sequence[float]], budget: float) -> float:
    """Share of right answers among those of the last `WINDOW` steps that were over by then."""
    over = max(1, sum(one <= budget + 1e-9 for one in curve["seconds"]))
    part = slice(max(0, over - WINDOW), over)
    return float(np.average(curve["pass_rate"][part], weights=curve["episodes"][part]))


def _tables(arms: Arms) -> dict[str, Any]:
    base = next(iter(arms))
    done = {arm: _done(arms, arm) for arm in arms}
    order = sorted(
        (arm for arm in arms if done[arm]),
        key=lambda arm: -fmean(one["pass@1"]["mean"] for one in done[arm].values()),
    )
    told = {"at equal episodes": at_equal_episodes(arms), "at equal seconds": at_equal_seconds(arms)}
    budget = seconds(arms)
    tables: dict[str, Any] = {
        "reached": [
            {
                "arm": f"`{arm}`",
                "pass@1, interval over seeds": interval(
                    [one["pass@1"]["mean"] for one in done[arm].values()]
                ),
                **{name: [one[name]["mean"] for one in done[arm].values()] for name in ("pass@8", "greedy")},
                "length": [one["length"] for one in done[arm].values()],
                "episodes": [sum(one["curve"]["episodes"]) for one in done[arm].values()],
                "processor seconds": [one["curve"]["seconds"][-1] for one in done[arm].values()],
                "wall seconds": [one["seconds"] for one in done[arm].values()],
            }
            for arm in order
        ]
    }
    for question, differences in told.items():
        corrected = holm({arm: p_value(values) for arm, values in differences.items()})
        tables[f"against {base} {question}"] = [
            {
                "arm": f"`{arm}`",
                **_by_seed(arms, base, arm, question, differences[arm]),
                "over seeds": interval(differences[arm]),
                "p": p_value(differences[arm]),
                "p corrected": corrected[arm],
            }
            for arm in order
            if arm in differences
        ]
    tables["compared at processor seconds"] = {f"seed {seed}": value for seed, value in budget.items()}
    return tables


def _by_seed(arms: Arms, base: str, arm: str, question: str, differences: Sequence[float]) -> dict[str, Any]:
    """The difference of each seed; of held-out tasks with its interval over tasks."""
    pairs = _pairs(arms, base, arm)
    if question == "at equal episodes":
        return {
            f"seed {seed}": paired_difference(_rates(other), _rates(one), seed=seed)._asdict()
            for seed, (other, one) in pairs.items()
        }
    return {f"seed {seed}": value for seed, value in zip(pairs, differences, strict=True)}


def _rates(record: Record) -> dict[str, float]:
    """Share of right answers by a held-out task's place."""
    return {str(place): int(count) / SAMPLES for place, count in enumerate(record["correct"])}


def _chart(arms: Arms) -> str:
    curves = {}
    for arm in arms:
        runs = [_smooth(one["curve"]) for one in _done(arms, arm).values()]
        if not runs:
            continue
        grid = np.linspace(max(x[0] for x, _ in runs), min(x[-1] for x, _ in runs), 60)
        values = np.array([np.interp(grid, x, y) for x, y in runs])
        curves[arm] = (grid, values.mean(0), values.min(0), values.max(0))
    return panels(curves, x="processor seconds", y="pass rate")


def _smooth(curve: Mapping[str, Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds, and the pass rate over the last `WINDOW` steps."""
    times = np.array(curve["seconds"])
    return times, np.array([rate_at(curve, time) for time in times])


def _arms(records: Sequence[Record], setting: str, order: Sequence[str]) -> Arms:
    found: Arms = {arm: {} for arm in order}
    for record in records:
        if record["setting"] == setting and record["arm"] in found:
            found[record["arm"]][record["seed"]] = record
    return {arm: _priced(runs) for arm, runs in found.items() if runs}


def _priced(runs: Mapping[int, Record]) -> dict[int, Record]:
    """Runs of one arm, whose curves have the seconds at the end of each step, from the end of the first.

    An episode of a step costs the least that it cost in any seed: what shares caches with a process adds to
    its processor seconds, and takes nothing away.
    """
    curves = {seed: one["curve"] for seed, one in runs.items() if "failed" not in one}
    spent = [np.diff(one["processor"]) / one["episodes"][1:] for one in curves.values()]
    least = np.min(spent, axis=0) if spent else np.zeros(0)
    priced = {}
    for seed, curve in curves.items():
        times = np.concatenate([[0.0], np.cumsum(least * curve["episodes"][1:])])
        priced[seed] = {**runs[seed], "curve": {**curve, "seconds": times.tolist()}}
    return {**runs, **priced}


def _done(arms: Arms, arm: str) -> dict[int, Record]:
    return {seed: one for seed, one in sorted(arms[arm].items()) if "failed" not in one}


def _pairs(arms: Arms, base: str, arm: str) -> dict[int, tuple[Record, Record]]:
    """(first arm, this arm) by seed, where both came to the end."""
    mine, theirs = _done(arms, arm), _done(arms, base)
    return {seed: (theirs[seed], mine[seed]) for seed in mine if seed in theirs}
