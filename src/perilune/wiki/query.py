"""The queries that put numbers into pages.

```
FIGURE of run ID                                       of one run, with its interval over tasks
mean FIGURE of recipe NAME stage STAGE [with K=V ...]  over seeds, with Student's t interval
best FIGURE of recipe NAME stage STAGE [with K=V ...]  of the best run
count of recipe NAME stage STAGE [with K=V ...]        number of runs
difference FIGURE of recipe ... minus recipe ...       paired by seed
```

K=V is an override of the experiment, `seed=N`, or `setting=DIGEST`. A query has no loops and no calls, so
a query from an untrusted page can only read figures.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from perilune.control.queries.comparison import is_share, lower_is_better
from perilune.errors import RequestError
from perilune.metrics.across_seeds import t_interval
from perilune.plural import plural
from perilune.wiki.facts import Figure, RunFacts

WORD = r"[^\s<>{}|`]+"
_RUN_QUERY = re.compile(rf"(?P<figure>{WORD}) of run (?P<run>[0-9A-Za-z]+)$")
_STAGE_QUERY = re.compile(
    rf"(?:(?P<kind>mean|best|difference) (?P<figure>{WORD})|count) of (?P<selected>recipe .+?)"
    rf"(?: minus (?P<minus>recipe .+))?$"
)
_SELECTION = re.compile(rf"recipe (?P<recipe>{WORD}) stage (?P<stage>{WORD})(?: with (?P<wanted>.+))?$")
HINT = "for example: mean pass@1 of recipe quickstart stage after_rl"
Kind = Literal["run", "mean", "best", "count", "difference"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a query.

    Attributes:
        text: the number as pages show it.
        runs: the runs that the number was computed from; for `best`, only the best.
        others: all runs that `best` chose from.
    """

    kind: Kind
    text: str
    figure: Figure
    runs: tuple[RunFacts, ...]
    others: tuple[RunFacts, ...] = ()


class Facts:
    """The facts of a home, for queries."""

    def __init__(self, runs: Sequence[RunFacts]) -> None:
        self.runs = tuple(runs)
        self.by_id: Mapping[str, RunFacts] = {run.id: run for run in runs}
        self._newest = {(run.experiment, run.stage): run for run in runs}
        self._stages: dict[tuple[str, str], list[RunFacts]] = {}
        for run in runs:
            self._stages.setdefault((run.recipe, run.stage), []).append(run)

    def run_of(self, experiment: str, stage: str) -> RunFacts | None:
        """Return the newest run of a stage."""
        return self._newest.get((experiment, stage))

    def ask(self, query: str) -> Answer:
        """Answer a query.

        Raises:
            RequestError: when the query is malformed or has no answer.
        """
        query = " ".join(query.split())
        if match := _RUN_QUERY.match(query):
            return self._of_run(match["figure"], match["run"])
        if not (match := _STAGE_QUERY.match(query)) or bool(match["minus"]) != (
            match["kind"] == "difference"
        ):
            raise RequestError(f"'{query}' is not a query", remedy=HINT)
        runs = self.select(match["selected"])
        if match["kind"] is None:
            return Answer("count", str(len(runs)), Figure(len(runs)), tuple(runs))
        figure = match["figure"]
        if match["kind"] == "best":
            return _best(figure, runs, query)
        if match["kind"] == "mean":
            by_seed = _group_by_seed(figure, runs, query)
            means = {seed: run.figures[figure].mean for seed, run in by_seed.items()}
            return _aggregate_seeds("mean", figure, means, runs)
        left, right = (_group_by_seed(figure, side, query) for side in (runs, self.select(match["minus"])))
        common = [seed for seed in left if seed in right]
        if not common:
            raise RequestError("the two sides of the difference have no seed in common", where=query)
        differences = {
            seed: left[seed].figures[figure].mean - right[seed].figures[figure].mean for seed in common
        }
        used = [side[seed] for seed in common for side in (left, right)]
        return _aggregate_seeds("difference", figure, differences, used)

    def named(self, query: str) -> list[RunFacts]:
        """Return the runs whose figures a query reads; none for a malformed query or a `count`."""
        query = " ".join(query.split())
        if match := _RUN_QUERY.match(query):
            run = self.by_id.get(match["run"].upper())
            return [run] if run else []
        match = _STAGE_QUERY.match(query)
        sides = [match["selected"], match["minus"]] if match and match["kind"] else []
        try:
            return [run for side in sides if side for run in self.select(side)]
        except RequestError:
            return []

    def select(self, selection: str) -> list[RunFacts]:
        """Return the runs that `recipe NAME stage STAGE [with K=V ...]` selects, the oldest first.

        Raises:
            RequestError: when the selection is malformed, or selects no run.
        """
        match = _SELECTION.match(selection)
        if not match:
            raise RequestError(f"'{selection}' is not a selection of runs", remedy=HINT)
        wanted = (match["wanted"] or "").split()
        runs = self._stages.get((match["recipe"], match["stage"]), [])
        runs = [
            run for run in runs if not run.superseded and all(_matches_pair(run, pair) for pair in wanted)
        ]
        if not runs:
            raise RequestError(f"no run fits '{selection}'", remedy="`perilune runs` lists the names")
        return runs

    def _of_run(self, figure: str, run: str) -> Answer:
        facts = self.by_id.get(run.upper())
        if facts is None:
            raise RequestError(f"no run is called '{run}'", remedy="perilune runs")
        value = _get_figure(facts, figure)
        return Answer("run", format_figure(figure, value), value, (facts,))


def format_figure(name: str, figure: Figure, *, signed: bool = False) -> str:
    """Return a figure as text: shares in percent, other numbers with four digits, with the interval."""
    share = is_share(name)

    def number(value: float) -> str:
        sign = "+" if signed and value > 0 else ""
        digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        return sign + (f"{100 * value:.1f}" if share else digits)

    unit = (" points" if signed else "%") if share else ""
    text = f"{number(figure.mean)}{unit}"
    return f"{text} ({' to '.join(map(number, figure.bounds))})" if figure.bounds else text


def _aggregate_seeds(kind: Kind, name: str, values: Mapping[int, float], runs: Sequence[RunFacts]) -> Answer:
    interval = t_interval([values[seed] for seed in sorted(values)])
    figure = Figure(interval["mean"]) if len(values) == 1 else Figure(**interval)
    text = format_figure(name, figure, signed=kind == "difference")
    return Answer(kind, f"{text}, {plural(len(values), 'seed')}", figure, tuple(runs))


def _best(figure: str, runs: Sequence[RunFacts], query: str) -> Answer:
    known = [run for run in runs if run.citable and figure in run.figures]
    if not known:
        names = dict.fromkeys(name for run in runs if run.citable for name in run.figures)
        remedy = f"one of: {', '.join(list(names)[:8])}" if names else "cite a recipe with figures"
        raise RequestError(f"no run has the figure '{figure}'", where=query, remedy=remedy)
    sign = -1 if lower_is_better(figure) else 1
    best = max(known, key=lambda run: sign * run.figures[figure].mean)
    value = best.figures[figure]
    text = f"{format_figure(figure, value)}, run {best.id}"
    return Answer("best", text, value, (best,), tuple(known))


def _group_by_seed(figure: str, runs: Sequence[RunFacts], query: str) -> dict[int, RunFacts]:
    """Return the runs by seed.

    Raises:
        RequestError: when the runs differ in more than the seed, or a run lacks the figure.
    """
    by_seed: dict[int, RunFacts] = {}
    for run in runs:
        _get_figure(run, figure)
        if run.setting != runs[0].setting:
            settings = ", ".join(dict.fromkeys(f"setting={other.setting}" for other in runs))
            remedy = f"add `with` and one of: {settings}"
            raise RequestError("these runs differ in more than the seed", where=query, remedy=remedy)
        by_seed[run.seed] = run
    return by_seed


def _get_figure(run: RunFacts, name: str) -> Figure:
    if run.problem:
        what = f"the evidence of run {run.id} is not valid: {run.problem}"
        raise RequestError(what, remedy=f"perilune verify {run.id}")
    if not run.figures:
        raise RequestError(f"run {run.id} ({run.state}) has no figures", remedy="cite a run with figures")
    if name not in run.figures:
        known = ", ".join(list(run.figures)[:8])
        raise RequestError(f"run {run.id} has no figure '{name}'", remedy=f"one of: {known}")
    return run.figures[name]


def _matches_pair(run: RunFacts, pair: str) -> bool:
    return pair in (f"seed={run.seed}", f"setting={run.setting}", *run.overrides)
