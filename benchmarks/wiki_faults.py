"""Plant one fault of each kind in a wiki, where a reader would not see it."""

import re
from collections.abc import Callable, Sequence

from perilune.control.evidence.attestation import evidence_paths
from perilune.control.queries.lookup import find_run
from perilune.control.runs.experiments import Control
from perilune.wiki.build import Wiki
from perilune.wiki.markdown import HAND_BEGIN, HAND_END
from wiki_home import another_run, figure, tampered

ARMS = ("arm=a", "arm=b", "arm=one")  # 60%, 61% with wide intervals, and one seed
RECIPE = "words"
# A build would repair or report the others.
BEFORE_A_BUILD = ("superseded-run", "few-seeds", "overlap")


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
        runs: ids of spare runs; three kinds of fault use one each.
    """

    def __init__(self, control: Control, wiki: Wiki, stage: str, runs: Sequence[str]) -> None:
        self.control, self.wiki, self.stage, self.runs = control, wiki, stage, list(runs)

    @property
    def kinds(self) -> dict[str, Callable[[str], None]]:
        """Functions that plant each kind of fault in the page of a question."""
        arms = [f"recipe {RECIPE} stage {self.stage} with {arm}" for arm in ARMS]
        mean = f"{{{{ mean pass@1 of {arms[2]} }}}}"
        difference = f"{{{{ difference pass@1 of {arms[1]} minus {arms[0]} }}}}"
        return {
            "dead-link": lambda page: self._say(page, "See [the other run](../runs/01ABCDEF.md)."),
            "orphan": self._leave,
            "stale-number": lambda page: self._edit(page, r"(of run \w+ -->)[\d.]+", r"\g<1>77.7"),
            "outdated-best": lambda page: self._edit(page, r"(run )\w+(<!--/-->)", r"\g<1>01OLDER\g<2>"),
            "bad-query": lambda page: self._say(page, f"It had {{{{ pass@9 of {arms[0]} }}}}."),
            "missing-evidence": lambda page: self._damage(page, missing=True),
            "failed-evidence": lambda page: self._damage(page, missing=False),
            "superseded-run": self._replace,
            "few-seeds": lambda page: self._say(page, f"The third arm is better: {mean}."),
            "overlap": lambda page: self._say(page, f"The second arm improves by {difference}."),
            "uncited-best": lambda page: self._say(page, "This is the best recipe that there is."),
            "uncited-comparison": lambda page: self._say(page, "The second arm is better than the first."),
            "bare-number": lambda page: self._say(page, "It reached 73.5% once."),
            "edited": lambda page: self._edit(
                page, f"^{re.escape(HAND_BEGIN)}", f"It is known.\n{HAND_BEGIN}"
            ),
        }

    def _say(self, page: str, sentence: str) -> None:
        self._edit(page, rf"\n{re.escape(HAND_END)}", f"\n{sentence}\n{HAND_END}")

    def _edit(self, page: str, pattern: str, into: str) -> None:
        text = self.wiki.pages()[page]
        changed, count = re.subn(pattern, lambda match: match.expand(into), text, count=1, flags=re.M)
        assert count == 1, (pattern, text)
        self.wiki.write(f"{page}.md", changed)

    def _leave(self, page: str) -> None:
        """Add the page of a run that does not exist."""
        copied = self.wiki.pages()[f"runs/{self.runs[0]}"]
        self.wiki.write(f"runs/01GONE{page.rpartition('-')[2]}.md", copied)

    def _cite(self, page: str) -> str:
        run = self.runs.pop()
        self._say(page, f"It had <!--= pass@1 of run {run} -->30.0% (25.0 to 35.0)<!--/-->.")
        return run

    def _damage(self, page: str, *, missing: bool) -> None:
        run = self._cite(page)
        if missing:
            evidence_paths(self.control.home, run, 1).result.unlink()
        else:
            tampered(self.control, run, 0.9)

    def _replace(self, page: str) -> None:
        """Replace a run by a retry with the same settings."""
        run = find_run(self.control, self._cite(page))
        name = next(other.recipe for other in self.wiki.facts(self.control).runs if other.id == run.id)
        seed = int(name.removeprefix("spare"))
        another_run(self.control, run, seed, figure(0.3), name=name, retry_of=run.id)
