"""A generated world of companies, their heads and cities, as documents with one fact each.

Product, seat and head of a company are in different documents. Former seats distract, and reprints repeat.
"""

import itertools
import random
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from perilune.environments.search.corpus import Corpus, Document

Style = Literal["natural", "compact"]
MAX_COMPANIES = 2000

_CONSONANTS = "bdfgjkmpqrtvwxyz"  # without the letters of relations, so that a tiny model can copy names
_MAX_COMPANIES_PER_CITY = 6  # most companies, so that a tiny model can count them
_MEAN_COMPANIES_PER_CITY = 3  # on average
_GOODS_COUNT = 4  # kinds of goods
_REPRINTED_SHARE, _MOVED_SHARE = 0.3, 0.5  # shares of facts and of companies
_SENTENCES = {
    "c": "{} has its seat in {}.",
    "s": "{} makes {}.",
    "h": "{} is led by {}.",
    "l": "{} lives in {}.",
    "n": "{} closed its office in {} long ago.",
}


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact, which one document states.

    Attributes:
        relation: c (seat in the city), s (sells), h (head), l (lives in), n (no longer in the city).
    """

    subject: str
    relation: str
    value: str

    def sentence(self, style: Style) -> str:
        if style == "compact":
            return f"{self.subject} {self.relation} {self.value}"
        return _SENTENCES[self.relation].format(self.subject.title(), _render_value(self))


@dataclass(frozen=True)
class World:
    """The facts of a world, and the order of its documents."""

    facts: tuple[Fact, ...]
    printed: tuple[Fact, ...]

    @cached_property
    def companies(self) -> tuple[str, ...]:
        return tuple(fact.subject for fact in self.facts if fact.relation == "c")

    @cached_property
    def values(self) -> dict[tuple[str, str], str]:
        """The value of each (subject, relation), except n."""
        return {(fact.subject, fact.relation): fact.value for fact in self.facts if fact.relation != "n"}

    @cached_property
    def by_city(self) -> dict[str, list[str]]:
        """The companies of each city that has some."""
        companies: dict[str, list[str]] = {}
        for company in self.companies:
            companies.setdefault(self.values[company, "c"], []).append(company)
        return companies


@lru_cache(maxsize=16)
def draw_world(seed: str, companies: int) -> World:
    draw = random.Random(f"facts/world/{seed}/{companies}")
    names = _all_names()
    draw.shuffle(names)
    unused = iter(names)
    cities = [next(unused) for _ in range(max(companies // _MEAN_COMPANIES_PER_CITY, 2))]
    goods = [next(unused) for _ in range(_GOODS_COUNT)]
    city_slots = [city for city in cities for _ in range(_MAX_COMPANIES_PER_CITY)]
    draw.shuffle(city_slots)
    facts = []
    for city in city_slots[:companies]:
        company, head = next(unused), next(unused)
        facts += [Fact(company, "c", city), Fact(company, "s", draw.choice(goods)), Fact(company, "h", head)]
        facts += [Fact(head, "l", draw.choice(cities))]
        if draw.random() < _MOVED_SHARE:
            facts += [Fact(company, "n", draw.choice([item for item in cities if item != city]))]
    printed = facts + [item for item in facts if draw.random() < _REPRINTED_SHARE]
    draw.shuffle(printed)
    return World(tuple(facts), tuple(printed))


@lru_cache(maxsize=16)
def make_corpus(seed: str, companies: int, style: Style) -> Corpus:
    return Corpus(
        tuple(
            _make_document(number, fact, style)
            for number, fact in enumerate(draw_world(seed, companies).printed, 1)
        )
    )


def _all_names() -> list[str]:
    """Return 4,800 names of four different letters."""
    syllables = ["".join(pair) for pair in itertools.product(_CONSONANTS, "aeiou")]
    return [a + b for a, b in itertools.product(syllables, repeat=2) if not {*a} & {*b}]


def _make_document(number: int, fact: Fact, style: Style) -> Document:
    title = "" if style == "compact" else f"Note {number}"
    return {"id": f"d{number}", "title": title, "text": fact.sentence(style)}


def _render_value(fact: Fact) -> str:
    return fact.value if fact.relation == "s" else fact.value.title()
