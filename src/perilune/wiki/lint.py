"""Finds the faults of a wiki, with one function for each kind."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from perilune.errors import RequestError
from perilune.metrics.across_seeds import MIN_SEEDS
from perilune.plural import plural
from perilune.wiki.build import is_question
from perilune.wiki.facts import RunFacts
from perilune.wiki.markdown import (
    CITATION,
    HAND_BEGIN,
    HAND_END,
    LINK,
    Citation,
    blank_code,
    find_citations,
    find_links,
    hand_span,
    is_built,
    is_edited,
)
from perilune.wiki.query import Answer, Facts
from perilune.wiki.wording import find_figures, is_claim, is_comparison, is_superlative

_BLANK = re.compile(r"[^\n]")
_SENTENCE = re.compile(r"[^.!?\n]+(?:[.!?](?!\s)[^.!?\n]*)*[.!?]?|\n")

_Fault = tuple[int, str, str]  # offset in the page, message, remedy


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault; `code` is the name of its rule in `RULES`."""

    page: str
    line: int
    code: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.page}.md:{self.line}: {self.code}: {self.message}\n  try: {self.remedy}"


@dataclass(frozen=True)
class _Page:
    """A page with the facts that the rules need."""

    path: str
    text: str
    facts: Facts
    known: frozenset[str]  # paths of all pages
    linked: frozenset[str]  # paths of the pages that other pages link to

    @cached_property
    def prose(self) -> str:
        """The text with spaces in place of code, citations and generated parts, so that offsets stay."""
        start, end = hand_span(self.text)
        visible = CITATION.sub(_blank_match, blank_code(self.text[start:end]))
        return _BLANK.sub(" ", self.text[:start]) + visible + _BLANK.sub(" ", self.text[end:])

    @cached_property
    def cited(self) -> list[tuple[Citation, Answer | RequestError]]:
        """The page's citations with their answers."""
        return [(cite, _try_answer(self.facts, cite.query)) for cite in find_citations(self.text)]

    @cached_property
    def runs(self) -> dict[RunFacts, int]:
        """The runs of the page: its subject at offset 0, and others at the offset of their first citation."""
        subject = self.facts.by_id.get(self.path.removeprefix("runs/"))
        runs = {subject: 0} if subject else {}
        for cite, _ in self.cited:
            for run in self.facts.named(cite.query):
                runs.setdefault(run, cite.place)
        return runs

    @cached_property
    def claims(self) -> list[tuple[int, str, list[Answer]]]:
        """Hand-written sentences with a word of comparison: offset, text, and the answers cited in them."""
        answers = {cite.place: answer for cite, answer in self.cited if isinstance(answer, Answer)}
        claims = []
        for sentence in _SENTENCE.finditer(self.prose):
            if is_claim(sentence[0]):
                inside = [answers[start] for start in answers if sentence.start() <= start < sentence.end()]
                claims.append((sentence.start(), sentence[0].strip(), inside))
        return claims


def lint_wiki(pages: Mapping[str, str], facts: Facts) -> list[Finding]:
    """Return all faults of a wiki, in order of page, line and kind.

    Args:
        pages: text by path without `.md`.
        facts: read without a cache, so that every signature and digest was checked.
    """
    known = frozenset(pages)
    linked = frozenset(
        target for path, text in pages.items() for target, _ in find_links(text, path) if target != path
    )
    findings = []
    for path, text in pages.items():
        page = _Page(path, text, facts, known, linked)
        for code, rule in RULES.items():
            for offset, message, remedy in rule(page):
                line = text.count("\n", 0, offset) + 1
                findings.append(Finding(path, line, code, message, remedy))
    return sorted(findings, key=lambda finding: (finding.page, finding.line, finding.code))


def _dead_links(page: _Page) -> Iterator[_Fault]:
    for target, offset in find_links(page.text, page.path):
        if target not in page.known:
            yield offset, f"there is no page '{target}'", "correct the link, or build the wiki"


def _orphans(page: _Page) -> Iterator[_Fault]:
    if page.path != "index" and page.path not in page.linked:
        what = "that no page links to" if is_question(page.path) else "of a run or name that no longer exists"
        yield 0, f"a page {what}", "build the wiki; then link or delete the page"


def _stale_numbers(page: _Page) -> Iterator[_Fault]:
    for cite, answer in page.cited:
        if isinstance(answer, Answer) and cite.shown != answer.text and not _is_outdated_best(cite, answer):
            was = "has no number yet" if cite.shown is None else f"says {cite.shown}"
            message = f"'{cite.query}' {was}; the evidence says {answer.text}"
            yield cite.place, message, "perilune wiki build"


def _outdated_best(page: _Page) -> Iterator[_Fault]:
    for cite, answer in page.cited:
        if isinstance(answer, Answer) and _is_outdated_best(cite, answer):
            remedy = "perilune wiki build, and read the sentence again"
            yield cite.place, f"'{cite.query}' is now {answer.text}", remedy


def _is_outdated_best(cite: Citation, answer: Answer) -> bool:
    return answer.kind == "best" and cite.shown is not None and f"run {answer.runs[0].id}" not in cite.shown


def _bad_queries(page: _Page) -> Iterator[_Fault]:
    for cite, answer in page.cited:
        if isinstance(answer, RequestError) and all(run.citable for run in page.facts.named(cite.query)):
            yield cite.place, answer.what, answer.remedy or "correct the query"


def _missing_evidence(page: _Page) -> Iterator[_Fault]:
    for run, start in page.runs.items():
        if run.is_missing or (start and not run.problem and not run.figures):
            why = run.problem or f"it is {run.state}"
            yield start, f"run {run.id} has no evidence: {why}", "cite a run that succeeded"


def _failing_evidence(page: _Page) -> Iterator[_Fault]:
    for run, start in page.runs.items():
        if run.problem and not run.is_missing:
            yield start, f"run {run.id}: {run.problem}", f"perilune verify {run.id}"


def _superseded_runs(page: _Page) -> Iterator[_Fault]:
    start, end = hand_span(page.text)
    for cite, answer in page.cited:
        if not isinstance(answer, Answer) or answer.kind != "run" or not start <= cite.place < end:
            continue
        if answer.runs[0].superseded:
            yield cite.place, f"a retry replaced run {answer.runs[0].id}", "cite the newer run"


def _few_seeds(page: _Page) -> Iterator[_Fault]:
    remedy = f"run at least {MIN_SEEDS} seeds, or report the figures without a comparison"
    for offset, _, answers in page.claims:
        for answer in answers:
            seeds = len({run.seed for run in answer.runs})
            if answer.kind in ("mean", "difference", "run") and seeds < MIN_SEEDS:
                yield offset, f"a claim from {plural(seeds, 'seed')}", remedy
                break


def _overlaps(page: _Page) -> Iterator[_Fault]:
    for offset, _, answers in page.claims:
        differences = [answer for answer in answers if answer.kind == "difference"]
        if any(_intervals_overlap(answer.figure.bounds, (0.0, 0.0)) for answer in differences):
            yield offset, "the interval of the difference contains 0", 'say "no difference shown"'
        single = [answer.figure.bounds for answer in answers if answer.kind in ("mean", "run")]
        if not differences and any(_intervals_overlap(a, b) for a, b in combinations(single, 2)):
            yield offset, "the intervals overlap", "cite the difference, paired by seed"


def _intervals_overlap(a: tuple[float, float] | None, b: tuple[float, float] | None) -> bool:
    return a is not None and b is not None and a[0] <= b[1] and b[0] <= a[1]


def _bare_best(page: _Page) -> Iterator[_Fault]:
    remedy = "cite: best FIGURE of recipe NAME stage STAGE"
    for offset, text, answers in page.claims:
        if is_superlative(text) and not any(answer.kind in ("best", "difference") for answer in answers):
            yield offset, "this superlative cites no query", remedy


def _bare_comparison(page: _Page) -> Iterator[_Fault]:
    remedy = "cite: difference FIGURE of recipe A stage STAGE minus recipe B stage STAGE"
    for offset, text, answers in page.claims:
        if is_comparison(text) and not answers and not is_superlative(text):
            yield offset, "this comparison cites no query", remedy


def _bare_numbers(page: _Page) -> Iterator[_Fault]:
    for number in find_figures(LINK.sub(_blank_match, page.prose)):
        message = f"the number {number[0].strip()} is not a citation"
        yield number.start(), message, "write {{ FIGURE of run ID }}, or put the number in `code`"


def _edited(page: _Page) -> Iterator[_Fault]:
    if not is_built(page.text):
        if not is_question(page.path):
            yield 0, "the front matter is damaged", "perilune wiki build --overwrite"
    elif is_edited(page.text) or page.text.splitlines().count(HAND_BEGIN) != 1:
        remedy = f"move your text between {HAND_BEGIN} and {HAND_END}; perilune wiki build --overwrite"
        yield 0, "the generated text was changed", remedy


RULES: dict[str, Callable[[_Page], Iterator[_Fault]]] = {
    "dead-link": _dead_links,
    "orphan": _orphans,
    "stale-number": _stale_numbers,
    "outdated-best": _outdated_best,
    "bad-query": _bad_queries,
    "missing-evidence": _missing_evidence,
    "failed-evidence": _failing_evidence,
    "superseded-run": _superseded_runs,
    "few-seeds": _few_seeds,
    "overlap": _overlaps,
    "uncited-best": _bare_best,
    "uncited-comparison": _bare_comparison,
    "bare-number": _bare_numbers,
    "edited": _edited,
}


def _blank_match(found: re.Match[str]) -> str:
    return " " * len(found[0])


def _try_answer(facts: Facts, query: str) -> Answer | RequestError:
    try:
        return facts.ask(query)
    except RequestError as error:
        return error
