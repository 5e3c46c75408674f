"""Questions about a world: one hop, two hops, a count, and a count over two facts of each company."""

import random
from dataclasses import dataclass
from typing import Literal

from perilune.environments.search.facts.world import Style, World

Kind = Literal["one", "two", "count", "join"]
KINDS: tuple[Kind, ...] = ("one", "two", "count", "join")
_ASKED = {"c": "In which city does {} have its seat?", "s": "What does {} make?", "h": "Who leads {}?"}
_NAME, _NUMBER = " Answer with the name only.", " Answer with a number only."


@dataclass(frozen=True, slots=True)
class Question:
    """A question.

    Attributes:
        name: a company (one, two) or a city (count, join).
        relation: what is asked about the company (one).
        goods: what the counted companies make (join).
    """

    kind: Kind
    name: str
    relation: str = ""
    goods: str = ""


def draw_question(world: World, kind: Kind, draw: random.Random) -> Question:
    """A question with an answer other than nothing."""
    company = draw.choice(world.companies)
    match kind:
        case "one":
            return Question(kind, company, draw.choice(list(_ASKED)))
        case "two":
            return Question(kind, company)
        case "count":
            return Question(kind, world.values[company, "c"])
    return Question(kind, world.values[company, "c"], goods=world.values[company, "s"])


def answer(world: World, asked: Question) -> str:
    """The right answer."""
    match asked.kind:
        case "one":
            return world.values[asked.name, asked.relation]
        case "two":
            return world.values[world.values[asked.name, "h"], "l"]
    companies = world.by_city[asked.name]
    return str(sum(asked.goods in ("", world.values[one, "s"]) for one in companies))


def write_question(asked: Question, style: Style) -> str:
    """The question as a text."""
    if style == "compact":
        return {
            "one": f"{asked.name} {asked.relation}>",
            "two": f"{asked.name} h l>",
            "count": f"#c {asked.name}>",
            "join": f"#c {asked.name} s {asked.goods}>",
        }[asked.kind]
    name = asked.name.title()
    match asked.kind:
        case "one":
            return _ASKED[asked.relation].format(name) + _NAME
        case "two":
            return f"In which city does the head of {name} live?{_NAME}"
        case "count":
            return f"How many companies have their seat in {name}?{_NUMBER}"
    return f"How many companies with their seat in {name} make {asked.goods}?{_NUMBER}"
