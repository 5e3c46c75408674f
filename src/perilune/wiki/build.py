"""Compiles the wiki: writes the pages of all runs, and fills in the numbers. Equal homes give equal bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from perilune.control.runs.experiments import Control
from perilune.errors import RequestError
from perilune.files import write_atomic
from perilune.wiki.facts import RunFacts, read_facts
from perilune.wiki.markdown import (
    fill_citations,
    find_citations,
    find_links,
    hand_text,
    is_built,
    is_edited,
    read_front_matter,
    render_page,
)
from perilune.wiki.pages import Page, generate_pages, group_runs, index_page, page_path, render_link
from perilune.wiki.plot import plot_runs
from perilune.wiki.query import Facts

QUESTIONS_FOLDER = "questions"
NO_NUMBER = "no number"
CACHE_FOLDER = ".perilune"  # holds the cache; its files are not pages


@dataclass(frozen=True, slots=True)
class Change:
    """A number that a build replaced."""

    page: str
    query: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class BuildResult:
    """The result of a build.

    Attributes:
        kept: pages that were not written, because their generated text was edited by hand.
        unanswered: citations without an answer, as page and reason.
    """

    runs: int
    pages: int
    written: int
    removed: int
    changed: tuple[Change, ...]
    kept: tuple[str, ...]
    unanswered: tuple[tuple[str, str], ...]


class Wiki:
    """The files of a wiki."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def of(cls, control: Control, root: Path | None = None) -> Wiki:
        """Return the wiki in `root`, or else in the folder `wiki` of the home."""
        return cls(root or control.home.root / "wiki")

    def facts(self, control: Control, *, verify: bool = False) -> Facts:
        """Return the facts for this wiki's numbers; `verify` checks every signature and digest again."""
        return Facts(read_facts(control, None if verify else self.root / CACHE_FOLDER / "facts.json"))

    def pages(self) -> dict[str, str]:
        """Return the text of each page by its path without `.md`, sorted."""
        pages = {}
        for path in sorted(self.root.rglob("*.md")):
            name = path.relative_to(self.root).as_posix().removesuffix(".md")
            if path.is_file() and not name.startswith(CACHE_FOLDER):
                pages[name] = path.read_text(encoding="utf-8", errors="replace")
        return pages

    def built_pages(self) -> dict[str, str]:
        """Return `pages`.

        Raises:
            RequestError: when there is no page.
        """
        if pages := self.pages():
            return pages
        raise RequestError("there is no wiki", where=str(self.root), remedy="perilune wiki build")

    def write(self, name: str, text: str) -> None:
        """Write a file, creating its folder."""
        write_atomic(self.root / name, text)


def compile_wiki(wiki: Wiki, facts: Facts, *, overwrite: bool = False) -> BuildResult:
    """Write all pages. Keeps hand-written regions, and fills in their citations.

    Removes pages of runs and names that no longer exist, except for pages with hand-written text.

    Args:
        overwrite: also write pages whose generated text was edited.
    """
    (wiki.root / QUESTIONS_FOLDER).mkdir(parents=True, exist_ok=True)
    old = wiki.pages()
    hands = {path: hand_text(text) for path, text in old.items()}
    generated = {page.path: page for page in generate_pages(facts)}
    generated |= {path: _question_page(path, old[path], hands[path]) for path in old if is_question(path)}
    generated["index"] = index_page(generated.values())
    mentions = _collect_mentions(hands)

    kept, changed, unanswered, written = [], list[Change](), list[tuple[str, str]](), 0
    for path, page in generated.items():
        before = old.get(path, "")
        if before and is_edited(before) and not overwrite:
            kept.append(path)
            continue
        text = _compile_page(facts, page, hands.get(path, ""), mentions.get(path, ()), unanswered)
        if text != before:
            changed += _list_changes(path, before, text)
            wiki.write(f"{path}.md", text)
            written += 1
    for name, runs in group_runs(facts.runs, "recipe").items():
        drawn, path = plot_runs(runs), f"{page_path('recipe', name)}.svg"
        if drawn and (not (wiki.root / path).exists() or (wiki.root / path).read_text() != drawn):
            wiki.write(path, drawn)
    removed = [
        path for path, text in old.items() if path not in generated and is_built(text) and not hands[path]
    ]
    for path in removed:
        (wiki.root / f"{path}.md").unlink()
    return BuildResult(
        len(facts.runs), len(generated), written, len(removed), tuple(changed), tuple(kept), tuple(unanswered)
    )


def _compile_page(
    facts: Facts, page: Page, hand: str, mentioned: Iterable[str], unanswered: list[tuple[str, str]]
) -> str:
    """Return the text of a page. Adds its citations without an answer to `unanswered`."""
    sources: dict[str, RunFacts] = {run.id: run for run in page.runs}

    def answer(query: str) -> str | None:
        try:
            result = facts.ask(query)
        except RequestError as error:
            unanswered.append((page.path, str(error)))
            return None
        sources.update({run.id: run for run in (*result.runs, *result.others)})
        return result.text

    hand = fill_citations(hand, answer)
    links = [f"* {render_link(page.path, path, path)}" for path in mentioned]
    tail = ["## Mentioned in", "", *links] if links else []
    front = {
        "title": page.title,
        "kind": page.kind,
        "queries": [citation.query for citation in find_citations(hand)],
        "evidence": {name: run.evidence for name, run in sorted(sources.items()) if run.evidence},
    }
    return render_page(front, page.text, hand, "\n".join(tail))


def _question_page(path: str, text: str, hand: str) -> Page:
    """Return the page of a question, titled by its author's heading, its front matter or its file name."""
    first = hand.lstrip().partition("\n")[0]
    written = first.removeprefix("# ").strip() if first.startswith("# ") else ""
    title = written or str(read_front_matter(text).get("title") or path.rpartition("/")[2].replace("-", " "))
    return Page(path, "question", title, "" if written else f"# {title}")


def is_question(path: str) -> bool:
    """Return whether the page at `path` is a question, which people and models write."""
    return path.startswith(f"{QUESTIONS_FOLDER}/")


def _collect_mentions(hands: Mapping[str, str]) -> dict[str, dict[str, None]]:
    """Return, for each page, the pages whose hand-written text links to it."""
    mentions: dict[str, dict[str, None]] = {}
    for path, hand in hands.items():
        for target, _ in find_links(hand, path):
            mentions.setdefault(target, {})[path] = None
    return mentions


def _list_changes(path: str, before: str, after: str) -> Iterator[Change]:
    """Yield the numbers of a page that changed or lost their evidence."""
    now = {citation.query: citation.shown for citation in find_citations(after)}
    for citation in find_citations(before):
        number = now.get(citation.query) or NO_NUMBER
        if citation.shown is not None and number != citation.shown:
            yield Change(path, citation.query, citation.shown, number)
