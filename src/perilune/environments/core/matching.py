"""Whether an output is the stated answer, in the usual ways of asking that."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

Match = Literal["exact", "number", "contains", "regex"]

_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:0|[1-9]\d{0,2}(?:,\d{3}){1,12}|[1-9]\d{0,39})(?:\.\d{1,40})?(?![\w,.]*\d)", re.ASCII
)


def matches(match: Match, output: str, answer: str) -> bool:
    """Whether `output` gives `answer`.

    "exact": it is the answer, but for space around it. "number": the last number that it holds is equal, so
    that 1,000 is 1000.0. "contains": the answer stands in it as whole words, in whatever case. "regex": the
    answer is a regular expression that all of it matches, but for space around it.
    """
    output = output.strip()
    if match == "exact":
        return output == answer.strip()
    if match == "number":
        wanted = last_number(answer)
        return wanted is not None and last_number(output) == wanted
    if match == "contains":
        words = re.escape(answer.strip())
        return re.search(rf"(?<!\w){words}(?!\w)", output, re.IGNORECASE) is not None
    return re.fullmatch(answer, output) is not None


def last_number(text: str) -> Decimal | None:
    """The last plain number in `text`; None when there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def unfit(match: Match, answer: str) -> str:
    """Why no output could sensibly match `answer`; empty when some could."""
    if not answer.strip():
        return "the answer is empty"
    if match == "number" and last_number(answer) is None:
        return f"the answer {answer[:40]!r} holds no number"
    if match == "regex":
        try:
            if re.compile(answer).fullmatch(""):
                return f"the answer {answer[:40]!r} matches an empty output"
        except (re.error, OverflowError, RecursionError) as error:
            return f"the answer {answer[:40]!r} is no regular expression: {error}"
    return ""
