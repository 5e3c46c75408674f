"""Questions about a world: one hop, two hops, a count, and a count over two facts of each company."""

import random
from dataclasses import dataclass
from typing import Literal

from perilune.environments.search.facts.world import Style, World

Kind = Literal["one", "two", "count", "join"]
KINDS: tuple[Kind, ...] = ("one", "two", "count", "join")
_QUESTIONS = {
    "c": "In which city does {} have its seat?",
    "s": "What does {} make?",
    "h": "Who leads {}?",
}
_NAME_FORM, _NUMBER_FORM = " Answer with the name only.", " Answer with a number only."


@dataclass(frozen=True, slots=True)
class Question:
    """A question.

    Attributes:
        name: a company (one, two) or a city (count, join).
        relation: the property of the company (one).
        goods: the product of the counted companies (join).
    """

    kind: Kind
    name: str
    relation: str = ""
    goods: str = ""


def draw_question(world: World, kind: Kind, draw: random.Random) -> Question:
    """Return a question with an answer other than nothing."""
    company = draw.choice(world.companies)
    match kind:
        case "one":
            return Question(kind, company, draw.choice(list(_QUESTIONS)))
        case "two":
            return Question(kind, company)
        case "count":
            return Question(kind, world.values[company, "c"])
    return Question(kind, world.values[company, "c"], goods=world.values[company, "s"])


def compute_answer(world: World, question: Question) -> str:
    match question.kind:
        case "one":
            return world.values[question.name, question.relation]
        case "two":
            return world.values[world.values[question.name, "h"], "l"]
    companies = world.by_city[question.name]
    return str(sum(question.goods in ("", world.values[company, "s"]) for company in companies))


def write_question(question: Question, style: Style) -> str:
    if style == "compact":
        return {
            "one": f"{question.name} {question.relation}>",
            "two": f"{question.name} h l>",
            "count": f"#c {question.name}>",
            "join": f"#c {question.name} s {question.goods}>",
        }[question.kind]
    name = question.name.title()
    match question.kind:
        case "one":
            return _QUESTIONS[question.relation].format(name) + _NAME_FORM
        case "two":
            return f"In which city does the head of {name} live?{_NAME_FORM}"
        case "count":
            return f"How many companies have their seat in {name}?{_NUMBER_FORM}"
    return f"How many companies with their seat in {name} make {question.goods}?{_NUMBER_FORM}"
