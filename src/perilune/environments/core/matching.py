"""Rules that compare an output with the reference answer."""

import re
import unicodedata
from decimal import Decimal
from typing import Literal

from perilune.environments.core.mathematics import is_equal

Match = Literal["exact", "number", "math", "contains", "regex"]

# Not a part of a word, fraction, power or root: neither 1/2, \frac{1}{2}, 2^10 nor \sqrt{2} has a number.
_NUMBER = re.compile(
    r"(?<![\w./^])(?<![/^] )(?<!\}\{)(?<!\^\{)(?<!sqrt\{)"
    r"[-+\u2212]?(?:0|[1-9]\d{0,2}(?:,\d{3}){1,12}|[1-9]\d{0,39})(?:\.\d{1,40})?"
    r"(?![\w,.]*\d)(?! ?/ ?[\d(\\]| ?\^(?!\{?\\circ)|\}\{)",
    re.ASCII,
)


def matches(match: Match, output: str, answer: str) -> bool:
    """Return whether `output` gives `answer`.

    * "exact": equal, apart from surrounding whitespace; accents may be characters of their own.
    * "number": the last number in the output equals the last number in the answer; 1,000 equals 1000.0.
    * "math": the whole output is equal to the answer as mathematics (`mathematics.is_equal`).
    * "contains": the answer occurs as whole words, in any case.
    * "regex": the answer is a regular expression that matches the whole output, apart from surrounding
      whitespace.
    """
    if match == "regex":
        return re.fullmatch(answer, output.strip()) is not None
    output, answer = (unicodedata.normalize("NFC", text.strip()) for text in (output, answer))
    if match == "exact":
        return output == answer
    if match == "number":
        expected = find_last_number(answer)
        return expected is not None and find_last_number(output) == expected
    if match == "math":
        return is_equal(output, answer)
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", output, re.IGNORECASE) is not None


def find_last_number(text: str) -> Decimal | None:
    """Return the last plain number in `text`; None if there is none."""
    numbers = find_plain_numbers(text)
    return Decimal(normalize_number(numbers[-1][0])) if numbers else None


def find_plain_numbers(text: str) -> list[re.Match[str]]:
    """Return the plain numbers in `text`, such as -3, 0.5 and 1,000."""
    return list(_NUMBER.finditer(text))


def normalize_number(number: str) -> str:
    """Return a plain number without separators and plus sign."""
    return number.replace(",", "").replace("\u2212", "-").removeprefix("+")


def unmatchable_reason(match: Match, answer: str) -> str:
    """Return the reason why this rule cannot match `answer`; empty if it can."""
    if not answer.strip():
        return "the answer is empty"
    if match == "number" and find_last_number(answer) is None:
        return f"the answer {answer[:40]!r} contains no number"
    if match == "regex":
        try:
            if re.compile(answer).fullmatch(""):
                return f"the answer {answer[:40]!r} matches an empty output"
        except (re.error, OverflowError, RecursionError) as error:
            return f"the answer {answer[:40]!r} is not a regular expression: {error}"
    return ""
