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
        text: the number as it stands in a page.
        figure: its value and interval.
        runs: the runs that it was computed from; of `best`, the best alone.
        others: all runs that `best` chose from.
    """

    kind: Kind
    name: str
    text: str
    figure: Figure
    runs: tuple[RunFacts, ...]
    others: tuple[RunFacts, ...] = ()


class Facts:
    """The facts of a home, for queries."""

    def __init__(self, runs: Sequence[RunFacts]) -> None:
        self.runs = tuple(runs)
        self.by_id: Mapping[str, RunFacts] = {one.id: one for one in runs}
        self._newest = {(one.experiment, one.stage): one for one in runs}
        self._stages: dict[tuple[str, str], list[RunFacts]] = {}
        for one in runs:
            self._stages.setdefault((one.recipe, one.stage), []).append(one)

    def run_of(self, experiment: str, stage: str) -> RunFacts | None:
        """Return the newest run of a stage."""
        return self._newest.get((experiment, stage))

    def ask(self, query: str) -> Answer:
        """Answer a query.

        Raises:
            RequestError: it is malformed, or names a run, recipe or figure that does not exist.
        """
        query = " ".join(query.split())
        if found := _RUN_QUERY.match(query):
            return self._of_run(found["figure"], found["run"])
        if not (found := _STAGE_QUERY.match(query)) or bool(found["minus"]) != (
            found["kind"] == "difference"
        ):
            raise RequestError(f"'{query}' is not a query", remedy=HINT)
        runs = self.select(found["selected"])
        if found["kind"] is None:
            return Answer("count", "count", str(len(runs)), Figure(len(runs)), tuple(runs))
        figure = found["figure"]
        if found["kind"] == "best":
            return _best(figure, runs, query)
        if found["kind"] == "mean":
            by_seed = _group_by_seed(figure, runs, query)
            return _aggregate_seeds(
                "mean", figure, {seed: one.figures[figure].mean for seed, one in by_seed.items()}, runs
            )
        ours, theirs = (_group_by_seed(figure, some, query) for some in (runs, self.select(found["minus"])))
        common = [seed for seed in ours if seed in theirs]
        if not common:
            raise RequestError("the two sides of the difference have no seed in common", where=query)
        differences = {
            seed: ours[seed].figures[figure].mean - theirs[seed].figures[figure].mean for seed in common
        }
        return _aggregate_seeds(
            "difference", figure, differences, [side[seed] for seed in common for side in (ours, theirs)]
        )

    def named(self, query: str) -> list[RunFacts]:
        """The runs whose figures a query reads; empty for a malformed query, and for one that only counts."""
        query = " ".join(query.split())
        if found := _RUN_QUERY.match(query):
            run = self.by_id.get(found["run"].upper())
            return [run] if run else []
        found = _STAGE_QUERY.match(query)
        sides = [found["selected"], found["minus"]] if found and found["kind"] else []
        try:
            return [run for side in sides if side for run in self.select(side)]
        except RequestError:
            return []

    def select(self, selection: str) -> list[RunFacts]:
        """Return the current runs that a selection names, the oldest first.

        Raises:
            RequestError: it is malformed, or no run fits.
        """
        found = _SELECTION.match(selection)
        if not found:
            raise RequestError(f"'{selection}' selects nothing", remedy=HINT)
        wanted = (found["wanted"] or "").split()
        runs = self._stages.get((found["recipe"], found["stage"]), [])
        runs = [
            one for one in runs if not one.superseded and all(_matches_pair(one, pair) for pair in wanted)
        ]
        if not runs:
            raise RequestError(f"no run fits '{selection}'", remedy="names as in `perilune runs`")
        return runs

    def _of_run(self, figure: str, run: str) -> Answer:
        one = self.by_id.get(run.upper())
        if one is None:
            raise RequestError(f"no run is called '{run}'", remedy="perilune runs")
        value = _get_figure(one, figure)
        return Answer("run", figure, format_figure(figure, value), value, (one,))


def format_figure(name: str, figure: Figure, *, signed: bool = False) -> str:
    """Return a figure as text: shares in percent, other numbers with four digits, with the interval."""
    share = is_share(name)

    def one(value: float) -> str:
        sign = "+" if signed and value > 0 else ""
        number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        return sign + (f"{100 * value:.1f}" if share else number)

    unit = (" points" if signed else "%") if share else ""
    text = f"{one(figure.mean)}{unit}"
    return f"{text} ({' to '.join(map(one, figure.bounds))})" if figure.bounds else text


def _aggregate_seeds(kind: Kind, name: str, values: Mapping[int, float], runs: Sequence[RunFacts]) -> Answer:
    found = t_interval([values[seed] for seed in sorted(values)])
    figure = Figure(found["mean"]) if len(values) == 1 else Figure(**found)
    seeds = f", {len(values)} seed{'s' if len(values) > 1 else ''}"
    text = format_figure(name, figure, signed=kind == "difference") + seeds
    return Answer(kind, name, text, figure, tuple(runs))


def _best(figure: str, runs: Sequence[RunFacts], query: str) -> Answer:
    known = [one for one in runs if one.citable and figure in one.figures]
    if not known:
        raise RequestError(f"no run has the figure '{figure}'", where=query)
    sign = -1 if lower_is_better(figure) else 1
    best = max(known, key=lambda one: sign * one.figures[figure].mean)
    value = best.figures[figure]
    text = f"{format_figure(figure, value)}, run {best.id}"
    return Answer("best", figure, text, value, (best,), tuple(known))


def _group_by_seed(figure: str, runs: Sequence[RunFacts], query: str) -> dict[int, RunFacts]:
    """Return the runs by seed, which must have one setting."""
    found: dict[int, RunFacts] = {}
    for one in runs:
        _get_figure(one, figure)
        if one.setting != runs[0].setting:
            settings = ", ".join(dict.fromkeys(f"setting={each.setting}" for each in runs))
            raise RequestError(
                "these runs differ in more than the seed", where=query, remedy=f"with one of {settings}"
            )
        found[one.seed] = one
    return found


def _get_figure(run: RunFacts, name: str) -> Figure:
    if run.problem:
        raise RequestError(
            f"the evidence of run {run.id} is not valid: {run.problem}", remedy="perilune verify"
        )
    if name not in run.figures:
        known = ", ".join(list(run.figures)[:8]) or f"it is {run.state}"
        raise RequestError(f"run {run.id} has no figure '{name}'", remedy=f"one of: {known}")
    return run.figures[name]


def _matches_pair(run: RunFacts, pair: str) -> bool:
    return pair in (f"seed={run.seed}", f"setting={run.setting}", *run.overrides)
