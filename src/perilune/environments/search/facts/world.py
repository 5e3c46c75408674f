"""A generated world of companies, their heads and cities, as documents with one fact each.

What a company makes, where it is and who leads it stand in different documents. Former
seats distract, and reprints repeat.
"""

import itertools
import random
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from perilune.environments.search.corpus import Corpus, Document

Style = Literal["natural", "compact"]
MOST_COMPANIES = 2000

_CONSONANTS = "bdfgjkmpqrtvwxyz"  # without the letters of relations, so that a tiny model can copy names
_IN_A_CITY = 6  # most companies, so that a tiny model can count them
_PER_CITY = 3  # on average
_GOODS = 4  # kinds of goods
_REPRINTED, _MOVED = 0.3, 0.5  # shares of facts and of companies
_SENTENCES = {
    "c": "{} has its seat in {}.",
    "s": "{} makes {}.",
    "h": "{} is led by {}.",
    "l": "{} lives in {}.",
    "n": "{} closed its office in {} long ago.",
}


@dataclass(frozen=True, slots=True)
class Fact:
    """What a document says.

    Attributes:
        relation: c (seat in the city), s (sells), h (head), l (lives in), n (no longer in the city).
    """

    subject: str
    relation: str
    value: str

    def sentence(self, style: Style) -> str:
        """The fact as a text."""
        if style == "compact":
            return f"{self.subject} {self.relation} {self.value}"
        return _SENTENCES[self.relation].format(self.subject.title(), _written(self))


@dataclass(frozen=True)
class World:
    """The facts of a world, and the order of its documents."""

    facts: tuple[Fact, ...]
    printed: tuple[Fact, ...]

    @cached_property
    def companies(self) -> tuple[str, ...]:
        """All companies."""
        return tuple(one.subject for one in self.facts if one.relation == "c")

    @cached_property
    def values(self) -> dict[tuple[str, str], str]:
        """The value of each (subject, relation), except n."""
        return {(one.subject, one.relation): one.value for one in self.facts if one.relation != "n"}

    @cached_property
    def by_city(self) -> dict[str, list[str]]:
        """The companies of each city that has some."""
        found: dict[str, list[str]] = {}
        for company in self.companies:
            found.setdefault(self.values[company, "c"], []).append(company)
        return found


@lru_cache(maxsize=16)
def draw_world(seed: str, companies: int) -> World:
    """The world of a seed."""
    draw = random.Random(f"facts/world/{seed}/{companies}")
    names = _names()
    draw.shuffle(names)
    fresh = iter(names)
    cities = [next(fresh) for _ in range(max(companies // _PER_CITY, 2))]
    goods = [next(fresh) for _ in range(_GOODS)]
    room = [city for city in cities for _ in range(_IN_A_CITY)]
    draw.shuffle(room)
    facts = []
    for city in room[:companies]:
        company, head = next(fresh), next(fresh)
        facts += [Fact(company, "c", city), Fact(company, "s", draw.choice(goods)), Fact(company, "h", head)]
        facts += [Fact(head, "l", draw.choice(cities))]
        if draw.random() < _MOVED:
            facts += [Fact(company, "n", draw.choice([one for one in cities if one != city]))]
    printed = facts + [one for one in facts if draw.random() < _REPRINTED]
    draw.shuffle(printed)
    return World(tuple(facts), tuple(printed))


@lru_cache(maxsize=16)
def corpus_of(seed: str, companies: int, style: Style) -> Corpus:
    """The documents of a world."""
    return Corpus(
        tuple(
            _document(number, fact, style)
            for number, fact in enumerate(draw_world(seed, companies).printed, 1)
        )
    )


def _names() -> list[str]:
    """4,800 names of four different letters."""
    syllables = ["".join(pair) for pair in itertools.product(_CONSONANTS, "aeiou")]
    return [one + other for one, other in itertools.product(syllables, repeat=2) if not {*one} & {*other}]


def _document(number: int, fact: Fact, style: Style) -> Document:
    title = "" if style == "compact" else f"Note {number}"
    return {"id": f"d{number}", "title": title, "text": fact.sentence(style)}


def _written(fact: Fact) -> str:
    return fact.value if fact.relation == "s" else fact.value.title()
