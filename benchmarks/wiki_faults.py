"""Plant ten different faults of each kind in a wiki, in different sentences, places and pages."""

import re
from collections.abc import Callable, Mapping, Sequence

from perilune.control.evidence.attestation import evidence_paths
from perilune.control.queries.lookup import find_run
from perilune.control.runs.experiments import Control
from perilune.wiki.build import Wiki
from perilune.wiki.markdown import HAND_BEGIN, HAND_END, find_citations, render_citation
from wiki_home import another_run, figure, tampered
from wiki_sentences import (
    BAD_QUERIES,
    BARE_NUMBERS,
    BEST,
    CITING,
    DEAD_LINKS,
    FEW_SEEDS,
    OVERLAPS,
    UNCITED_BEST,
    UNCITED_COMPARISONS,
)

ARMS = ("arm=a", "arm=b", "arm=one")  # 60%, 61% with wide intervals, and one seed
RECIPE = "words"
# A build would repair or report the others.
BEFORE_A_BUILD = ("superseded-run", "few-seeds", "overlap")
SENTENCES: Mapping[str, Sequence[str]] = {
    "dead-link": DEAD_LINKS,
    "bad-query": BAD_QUERIES,
    "few-seeds": FEW_SEEDS,
    "overlap": OVERLAPS,
    "uncited-best": UNCITED_BEST,
    "uncited-comparison": UNCITED_COMPARISONS,
    "bare-number": BARE_NUMBERS,
}
FORMS = ("{}", "* {}", "> {}", "| note | {} |", "A note from a meeting: {}")
# Changes of the number that a citation shows, by the beginning of its query.
STALE: Sequence[tuple[str, Callable[[str], str]]] = (
    ("pass@1 of run", lambda shown: re.sub(r"^[\d.]+", "77.7", shown)),
    ("mean", lambda shown: re.sub(r"^[\d.]+", "12.3", shown)),
    ("count", lambda shown: str(int(shown) + 1)),
    ("difference", lambda shown: re.sub(r"\d+\.\d", "9.9", shown, count=1)),
    ("pass@1 of run", lambda shown: re.sub(r"to [\d.]+", "to 99.9", shown)),
    ("mean", lambda shown: shown.replace("3 seeds", "5 seeds")),
    ("difference", lambda shown: re.sub(r" \(.*\)", "", shown)),
    ("best", lambda shown: re.sub(r"^[\d.]+", "95.5", shown)),
    ("pass@1 of run", lambda shown: ""),
    ("count", lambda shown: f"about {shown}"),
)
# The page, a place outside of its hand-written text, and what replaces it. OTHER is the page of a run.
EDITS = (
    ("PAGE", f"^{HAND_BEGIN}", f"It is known.\n{HAND_BEGIN}"),
    ("OTHER", r"^# (.*)", r"# The famous \1"),
    ("OTHER", r"^\| task \| \w+ \|", "| task | chess |"),
    ("OTHER", r"(-->)\d[\d.,]*", r"\g<1>7"),
    ("OTHER", f"^{HAND_BEGIN}", f"{HAND_BEGIN}\n{HAND_BEGIN}"),
    ("OTHER", r"^generated: .*\n", ""),
    ("OTHER", r"^\| state \| succeeded \|\n", ""),
    ("index", r"^## Recipes", "## Our recipes"),
    ("log", r"^# .*", "# The log"),
    ("OTHER", f"{HAND_END}", f"{HAND_END}\n\nA note at the end."),
)
ORPHANS = (
    "runs/01GONE0", "recipes/gone-1", "environments/gone-2", "algorithms/gone-3", "questions/gone-4",
    "runs/01GONE5", "recipes/gone-6", "environments/gone-7", "questions/gone-8", "runs/01GONE9",
)  # fmt: skip


def fill_queries(sentence: str, stage: str) -> str:
    """Return a sentence of `wiki_sentences` with queries in place of its words in capitals."""
    first, second, single = (f"pass@1 of recipe {RECIPE} stage {stage} with {arm}" for arm in ARMS)
    queries = {
        "MEAN": f"mean {first}",
        "OTHER": f"mean {second}",
        "SINGLE": f"mean {single}",
        "DIFFERENCE": f"difference {second} minus {first.partition(' of ')[2]}",
    }
    filled = re.sub(
        r"\b(?:MEAN|OTHER|SINGLE|DIFFERENCE)\b", lambda word: f"{{{{ {queries[word[0]]} }}}}", sentence
    )
    return filled.replace("RECIPE", f"recipe {RECIPE} stage {stage}")


def add_arms(control: Control, base: str) -> list[str]:
    """Add runs of three settings: two of three seeds with overlapping intervals, one of one seed."""
    run, runs = find_run(control, base), []
    for arm, rates in zip(ARMS, ((0.5, 0.6, 0.7), (0.52, 0.6, 0.71), (0.9,)), strict=True):
        runs += [
            another_run(control, run, seed, figure(rate), [arm], RECIPE) for seed, rate in enumerate(rates)
        ]
    return runs


def spare_runs(control: Control, base: str, count: int) -> list[str]:
    """Add runs that faults may damage, each with its own recipe."""
    run = find_run(control, base)
    return [another_run(control, run, number, figure(0.3), name=f"spare{number}") for number in range(count)]


def question(stage: str, run: str) -> str:
    """A page without a fault, with every kind of citation."""
    arms = [f"recipe {RECIPE} stage {stage} with {arm}" for arm in ARMS]
    return (
        "# What did the arms reach?\n\n"
        f"The first had {{{{ mean pass@1 of {arms[0]} }}}} on seed 0 to seed 2.\n"
        f"No difference shown: {{{{ difference pass@1 of {arms[1]} minus {arms[0]} }}}}.\n"
        f"The best run: {{{{ best pass@1 of recipe {RECIPE} stage {stage} }}}} of "
        f"{{{{ count of recipe {RECIPE} stage {stage} }}}} runs. One of them: {{{{ pass@1 of run {run} }}}}, "
        f"[its page](../runs/{run}.md), since 2026-08-01.\n"
    )


class Planter:
    """Plants faults in pages and runs.

    Args:
        runs: ids of spare runs; three kinds of fault use one for each fault.
        others: pages of runs, for half of the faults in sentences and for most edits, which use one each.
    """

    def __init__(
        self, control: Control, wiki: Wiki, stage: str, runs: Sequence[str], others: Sequence[str]
    ) -> None:
        self.control, self.wiki, self.stage = control, wiki, stage
        self.runs, self.others = list(runs), list(others)

    def plant(self, kind: str, number: int, page: str) -> str:
        """Plant a fault, in the page of a question or in another, and return the page that has it.

        Args:
            number: which of the ten faults of the kind.
        """
        match kind:
            case "orphan":
                return self._leave(ORPHANS[number])
            case "stale-number":
                return self._restate(page, *STALE[number])
            case "outdated-best":
                return self._cite_old_best(page, number)
            case "missing-evidence" | "failed-evidence" | "superseded-run":
                return self._cite_damaged(kind, page, number)
            case "edited":
                where, pattern, into = EDITS[number]
                where = {"PAGE": page, "OTHER": self.others[-1]}.get(where, where)
                if where == self.others[-1]:
                    self.others.pop()
                return self._edit(where, pattern, into)
            case _:
                return self.say(page, fill_queries(SENTENCES[kind][number], self.stage), number)

    def say(self, page: str, sentence: str, number: int) -> str:
        """Write a sentence into a page, or every second time into another; the form depends on the number."""
        place = self.others.pop() if number % 2 else page
        text = FORMS[number % len(FORMS)].format(sentence)
        if number % 3 == 1:
            return self._edit(place, rf"^{re.escape(HAND_BEGIN)}\n", f"{HAND_BEGIN}\n{text}\n\n")
        return self._edit(place, rf"\n{re.escape(HAND_END)}", f"\n\n{text}\n{HAND_END}")

    def _edit(self, page: str, pattern: str, into: str) -> str:
        text = self.wiki.pages()[page]
        changed, count = re.subn(pattern, lambda match: match.expand(into), text, count=1, flags=re.M)
        assert count == 1, (pattern, text)
        self.wiki.write(f"{page}.md", changed)
        return page

    def _leave(self, page: str) -> str:
        """Add a page of a run or name that does not exist, or that no page links to."""
        copied = self.wiki.pages()[f"runs/{self.runs[0]}"]
        self.wiki.write(f"{page}.md", "# Why?\n" if page.startswith("questions/") else copied)
        return page

    def _restate(self, page: str, query: str, change: Callable[[str], str]) -> str:
        text = self.wiki.pages()[page]
        cite = next(cite for cite in find_citations(text) if cite.query.startswith(query))
        new = change(cite.shown or "")
        assert new != cite.shown, cite
        self.wiki.write(
            f"{page}.md", text[: cite.place] + render_citation(cite.query, new) + text[cite.end :]
        )
        return page

    def _cite_old_best(self, page: str, number: int) -> str:
        """Say which run is best, and name a run that no longer is."""
        sentence, selected = BEST[number]
        query = f"best pass@1 of recipe {RECIPE} stage {self.stage}{selected}"
        shown = re.sub(r"run \w+$", f"run 01OLDER{number}", self.wiki.facts(self.control).ask(query).text)
        return self.say(page, sentence.replace("RUN", render_citation(query, shown)), number)

    def _cite_damaged(self, kind: str, page: str, number: int) -> str:
        run = self.runs.pop()
        cited = render_citation(f"pass@1 of run {run}", "30.0% (25.0 to 35.0)")
        place = self.say(page, CITING[number].replace("RUN", cited), number)
        if kind == "missing-evidence":
            evidence_paths(self.control.home, run, 1).result.unlink()
        elif kind == "failed-evidence":
            tampered(self.control, run, 0.31 + 0.06 * number)
        else:
            self._replace(run)
        return place

    def _replace(self, replaced: str) -> None:
        """Replace a run by a retry with the same settings."""
        run = find_run(self.control, replaced)
        name = next(other.recipe for other in self.wiki.facts(self.control).runs if other.id == run.id)
        seed = int(name.removeprefix("spare"))
        another_run(self.control, run, seed, figure(0.3), name=name, retry_of=run.id)
