"""Writes the generated text of each page."""

import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from perilune.control.queries.comparison import TRAINING_FIGURES
from perilune.control.record.transitions import RunState
from perilune.errors import RequestError
from perilune.wiki.facts import RunFacts
from perilune.wiki.markdown import make_slug, quote, render_citation
from perilune.wiki.query import Facts

MAIN_FIGURES = ("pass@1", *(f"last.{name}" for name in TRAINING_FIGURES))
MAX_ROWS = 500  # rows of a table; the log has all runs


@dataclass(frozen=True, slots=True)
class Page:
    """The generated text of a page.

    Attributes:
        path: path in the wiki, without `.md`.
        runs: the runs that the page is about; the front matter has their evidence.
    """

    path: str
    kind: str
    title: str
    text: str
    runs: tuple[RunFacts, ...] = ()


def generate_pages(facts: Facts) -> Iterator[Page]:
    """Yield all generated pages but the index."""
    yield _log_page(facts)
    for run in facts.runs:
        yield _run_page(facts, run)
    for kind, write in KINDS.items():
        for name, runs in sorted(group_runs(facts.runs, kind).items()):
            yield write(facts, name, runs)


def index_page(pages: Iterable[Page]) -> Page:
    """Return the index: questions, recipes, environments and algorithms; runs are listed in the log."""
    log = render_link("index", "log", "log")
    lines = ["# Runs of this home", "", f"All runs in the order of their submission: {log}."]
    listed = list(pages)
    for kind in ("question", *KINDS):
        rows = [f"* {render_link('index', page.path, page.title)}" for page in listed if page.kind == kind]
        lines += ["", f"## {kind.capitalize()}s", "", *rows] if rows else []
    return Page("index", "index", "Runs of this home", "\n".join(lines))


def group_runs(runs: Sequence[RunFacts], kind: str) -> dict[str, list[RunFacts]]:
    """Return the runs by the name in their field `kind`, "recipe", "environment" or "algorithm"."""
    groups: dict[str, list[RunFacts]] = {}
    for run in runs:
        name = getattr(run, kind)
        if name:
            groups.setdefault(name, []).append(run)
    return groups


def main_figure(run: RunFacts) -> str | None:
    """Return the name of the figure that represents a run in tables."""
    return next((name for name in MAIN_FIGURES if name in run.figures), None) if run.citable else None


def render_link(page: str, path: str, label: str) -> str:
    return f"[{label}]({posixpath.relpath(path, posixpath.dirname(page) or '.')}.md)"


def page_path(kind: str, name: str) -> str:
    """Return the path of the page of a run, recipe, environment or algorithm."""
    return f"{kind}s/{name if kind == 'run' else make_slug(name)}"


def _run_page(facts: Facts, run: RunFacts) -> Page:
    path, title = page_path("run", run.id), f"{run.recipe}/{run.stage}, seed {run.seed}"
    names = {kind: getattr(run, kind) for kind in KINDS if getattr(run, kind)}
    facts_of_run = {
        "state": run.state,
        "submitted": _format_date(run.submitted),
        "task": run.task,
        "setting": run.setting,
        **{kind: render_link(path, page_path(kind, name), quote(name)) for kind, name in names.items()},
        "overrides": ", ".join(map(quote, run.overrides)),
        "takes": ", ".join(_parent_link(facts, path, run, parent) for parent in run.parents),
        "replaced by a retry": "yes" if run.superseded else "",
        "failed because": f"{quote(run.cause)} {quote(run.message)}" if run.state == RunState.FAILED else "",
        "evidence": f"**not valid**: {quote(run.problem)}" if run.problem else quote(run.evidence),
    }
    rows = [f"| {name} | {value} |" for name, value in facts_of_run.items() if value]
    lines = [f"# {title}", "", "| | |", "|---|---|", *rows]
    if run.citable:
        lines += ["", "## Figures", "", "| figure | value |", "|---|---|"]
        lines += [f"| {quote(name)} | {cite(facts, f'{name} of run {run.id}')} |" for name in run.figures]
    return Page(path, "run", title, "\n".join(lines), (run,))


def _recipe_page(facts: Facts, name: str, runs: Sequence[RunFacts]) -> Page:
    path, lines = page_path("recipe", name), [f"# Recipe {name}", ""]
    if any(main_figure(run) for run in runs):
        lines += [f"![Final figures by setting and seed]({posixpath.basename(path)}.svg)", ""]
    for stage in dict.fromkeys(run.stage for run in runs):
        current = [run for run in runs if run.stage == stage and not run.superseded]
        figure = next((main for run in current if (main := main_figure(run))), None)
        lines += [f"## {stage}", ""]
        if figure:
            lines += ["| setting | its own overrides | mean over seeds |", "|---|---|---|"]
            settings = _group_by_setting(current, figure)
            every = [set(group[0].overrides) for group in settings.values()]
            shared = set.intersection(*every) if every else set()
            for setting, group in settings.items():
                query = f"mean {figure} of recipe {name} stage {stage} with setting={setting}"
                overrides = ", ".join(quote(item) for item in group[0].overrides if item not in shared)
                lines.append(f"| {setting} | {overrides} | {cite(facts, query)} |")
            best = f"best {figure} of recipe {name} stage {stage}"
            lines += ["", f"Figure: {quote(figure)}. Best: {cite(facts, best)}.", ""]
        lines += [*_run_table(facts, path, current), ""]
    return Page(path, "recipe", f"Recipe {name}", "\n".join(lines), tuple(runs))


def _collection_writer(kind: str) -> Callable[[Facts, str, Sequence[RunFacts]], Page]:
    def write(facts: Facts, name: str, runs: Sequence[RunFacts]) -> Page:
        path, title = page_path(kind, name), f"{kind.capitalize()} {quote(name)}"
        text = "\n".join([f"# {title}", "", *_run_table(facts, path, runs)])
        return Page(path, kind, title, text, tuple(runs))

    return write


KINDS: dict[str, Callable[[Facts, str, Sequence[RunFacts]], Page]] = {
    "recipe": _recipe_page,
    "environment": _collection_writer("environment"),
    "algorithm": _collection_writer("algorithm"),
}


def _log_page(facts: Facts) -> Page:
    lines, day = ["# Log", ""], ""
    for run in sorted(facts.runs, key=lambda run: (run.submitted, run.id)):
        date = _format_date(run.submitted)
        lines += ["", f"## {date[:10]}", ""] if date[:10] != day else []
        day = date[:10]
        lines.append(f"* {date[11:]} {_run_link('log', run)}: {run.state}{_main_cell(facts, run)}")
    return Page("log", "log", "Log", "\n".join(lines))


def _run_table(facts: Facts, page: str, runs: Sequence[RunFacts]) -> list[str]:
    lines = ["| run | state | figure |", "|---|---|---|"]
    lines += [
        f"| {_run_link(page, run)} | {run.state} |{_main_cell(facts, run).lstrip(',')} |"
        for run in runs[-MAX_ROWS:]
    ]
    if len(runs) > MAX_ROWS:
        lines += ["", f"The newest {MAX_ROWS} of {len(runs)} runs."]
    return lines


def _main_cell(facts: Facts, run: RunFacts) -> str:
    if run.problem:
        return ", evidence not valid"
    figure = main_figure(run)
    return f", {figure} {cite(facts, f'{figure} of run {run.id}')}" if figure else ""


def _run_link(page: str, run: RunFacts) -> str:
    return render_link(page, page_path("run", run.id), f"{run.recipe}/{run.stage}, seed {run.seed}")


def _parent_link(facts: Facts, page: str, run: RunFacts, stage: str) -> str:
    parent = facts.run_of(run.experiment, stage)
    return render_link(page, page_path("run", parent.id), stage) if parent else quote(stage)


def _group_by_setting(runs: Sequence[RunFacts], figure: str) -> dict[str, list[RunFacts]]:
    groups: dict[str, list[RunFacts]] = {}
    for run in runs:
        groups.setdefault(run.setting, []).append(run)
    return {
        name: group
        for name, group in groups.items()
        if all(run.citable and figure in run.figures for run in group)
    }


def cite(facts: Facts, query: str) -> str:
    """Return a citation with its number, or the reason why the query has no answer."""
    try:
        return render_citation(query, facts.ask(query).text)
    except RequestError as error:
        return quote(error.what)


def _format_date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
