"""Lines, questions and answers in English."""

import re

from perilune.environments.builtin.oolong.questions import AFTER_ALL, BEFORE_ALL, Question
from perilune.environments.builtin.oolong.records import Record

YEAR = 2024
ANSWER_MARK = ""
PAIR_SEPARATOR = ", "
LABELS = ("abbreviation", "description", "entity", "human being", "location", "numeric value")
SIGNS = {1: "more", -1: "fewer", 0: "same"}
PHRASES = (
    (
        "What does the short form on the {} stand for?",
        "How is the word {} abbreviated?",
        "Which initials are stamped on the {}?",
        "What is the acronym for a {}?",
        "What do the letters on the {} mean?",
    ),
    (
        "Why does the {} need repair?",
        "How does a {} work?",
        "What is the difference between a {} and a model of one?",
        "What is the purpose of the {}?",
        "What is meant by a good {}?",
    ),
    (
        "What kind of paint protects the {}?",
        "Which tool opens the {}?",
        "What colour is the {}?",
        "Which material is the {} made of?",
        "What animal is shown on the {}?",
    ),
    (
        "Who designed the {}?",
        "Whose {} was it before?",
        "Which inventor patented the {}?",
        "Who was the last owner of the {}?",
        "Which engineer repaired the {}?",
    ),
    (
        "Where is the {} kept?",
        "Which city bought the {}?",
        "In which country was the {} found?",
        "On which street is the {}?",
        "Where does the {} come from?",
    ),
    (
        "How many visitors saw the {}?",
        "How much does the {} weigh?",
        "In which year was the {} built?",
        "How old is the {}?",
        "What percentage of the {} is original?",
    ),
)
"""The phrases of each label. The label is the kind of answer that the question asks for."""
_NOUNS = """
anchor balance barometer bell bridge cabinet camera candlestick carriage clock compass crane drum engine
fountain furnace gate globe harp kettle lamp lantern lathe lens lock loom machine map mast microscope mill
mirror organ pendulum piano plough press pump radio sail scale sextant statue stove sundial telescope tower
turbine typewriter violin wagon wheel
"""
_TOKEN = re.compile(r"[A-Za-z]+|[^A-Za-z\s]")
THINGS = tuple(_NOUNS.split())


def render_line(record: Record) -> str:
    phrases = PHRASES[record.label]
    thing, phrase = divmod(record.wording, len(phrases))
    text = phrases[phrase].format(THINGS[thing % len(THINGS)])
    return f"{_render_date(record.date)} | user {record.user} | {text}"


def count_tokens(text: str) -> int:
    """Return the estimated tokens of a line: one a word, a digit, a punctuation mark and the line end."""
    return len(_TOKEN.findall(text)) + 1


def render_month(number: int) -> str:
    return f"{YEAR}-{number:02}"


def render_question(question: Question) -> str:
    """Return the question, with all that an answer needs to know."""
    return f"{_CATEGORIES}\n\n{_render_condition(question)} {_ANSWER_FORMS[question.find]}"


_CATEGORIES = (
    "Each line has a date, a user and a question that this user asked. A question belongs to the category of"
    f" the answer that it asks for: {', '.join(LABELS[:-1])} or {LABELS[-1]}."
)
_ANSWER_FORMS = {
    "count": "Answer with a number only.",
    "most": "Answer with the category only.",
    "least": "Answer with the category only.",
    "compare": f"Answer with one word: {', '.join(SIGNS.values())}.",
    "user": "Answer with the user's number only.",
    "month": "Answer with year and month only, such as 2024-01.",
    "pairs": "Answer with pairs of numbers only, such as 1-4, 2-3.",
    "pairs_count": "Answer with a number only.",
}


def _render_condition(question: Question) -> str:
    label, other = f"'{LABELS[question.label]}'", f"'{LABELS[question.other]}'"
    lines = "lines" + (f" of user {question.user}" if question.user else "") + _render_period(question)
    match question.find:
        case "count":
            return f"How many {lines} have the category {label}?"
        case "most":
            return f"Which category has the most {lines}?"
        case "least":
            return f"Which category has the fewest {lines}?"
        case "compare":
            return f"Are there more {lines} with the category {label} than with {other}, fewer, or the same?"
        case "user" | "month":
            return f"Which {question.find} has the most {lines} with the category {label}?"
    number = question.number
    at_least = f"at least {number} {lines if number > 1 else lines.replace('lines', 'line', 1)}"
    condition = {
        "both": f"both users have {at_least} with the category {label}",
        "each": f"one user has {at_least} with the category {label}, and the other has {at_least} with the"
        f" category {other}",
        "equal": f"both users have the same number of {lines} with the category {label}, at least {number}",
        "sum": f"both users have {lines} with the category {label}, {number} together",
    }
    pairs = (
        "Which pairs of users are there" if question.find == "pairs" else "How many pairs of users are there"
    )
    return f"{pairs} such that {condition[question.relation]}?"


def _render_period(question: Question) -> str:
    if question.since > BEFORE_ALL and question.until < AFTER_ALL:
        return f" in {render_month(question.since // 100)}"
    if question.since > BEFORE_ALL:
        return f" dated {_render_date(question.since)} or later"
    return "" if question.until == AFTER_ALL else f" dated before {_render_date(question.until)}"


def _render_date(date: int) -> str:
    return f"{render_month(date // 100)}-{date % 100:02}"


def read_field(text: str) -> str | None:
    """Return the text in lower case without quotes, emphasis and a full stop."""
    return text.strip(" \n*_`'\"").removesuffix(".").strip("*_`'\"").lower()


def render_prompt(lines: str, question: str) -> str:
    return f"{lines}\n{question}"
