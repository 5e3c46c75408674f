"""Words shared by the leads: counts, lists, ranges, and comparisons over seeds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

Document = Mapping[str, Any]
Lead = tuple[str, str]
"""What was compared, on what; and what came out, with the main figure."""
Leads = Mapping[str, Callable[[Document], Lead]]

WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def count(number: int, noun: str) -> str:
    """A number with its noun; numbers up to ten are words."""
    word = WORDS[number] if 0 <= number < len(WORDS) else f"{number:,}"
    return f"{word} {noun}{'s' * (number != 1)}"


def listed(items: Sequence[str]) -> str:
    """Items as "a, b and c"."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def span(values: Iterable[float], form: str = ".2f") -> str:
    """The range of numbers, or the number if all are written the same."""
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(f"{value:{form}}" for value in (ordered[0], ordered[-1])))


def mean_share(values: Sequence[float]) -> str:
    """The mean of shares, in percent."""
    return f"{fmean(values):.1%}"


def change(row: Document) -> str:
    """The change of pass@1 in a comparison over seeds, and whether the test confirms it."""
    test = row["difference of pass@1, 95% interval"]
    low, mean, high = (f"{100 * test[name]:+.1f}" for name in ("low", "mean", "high"))
    confirmed = row["conclusion"] in ("higher", "lower")
    return f"{mean} points (95% interval {low} to {high}{'' if confirmed else ', not significant'})"
