"""Column arithmetic written out: the working that a teacher writes and a checker compares with.

An expression is a sum of terms (with + and -) or a product of factors (with *). Its working is a sequence of
column calculations from right to left, with one group of characters per column:

* sum         digit digit carry-in  two-digit sum         347+268  78015,46111,32106
* difference  digit digit borrow-in borrow-out and digit  512-348  28014,14116,53101
* product     digit digit carry-in  two-digit product     47*6     76042,46428

Every column of the longest number as written is worked out, so 047+002 has three. The intermediate value
stands between two steps, between slashes: 1+2+3 is `12003/3/33006`. A brief working keeps only the last two
characters of each column.
"""

import re
from collections.abc import Iterator
from itertools import zip_longest

_SUM = re.compile(r"(-?\d+)((?:[+-]-?\d+)*)")
_PRODUCT = re.compile(r"-?\d+(?:\*-?\d+)+")

Step = tuple[list[str], int]  # columns, and the value after them


def parse_terms(expression: str) -> tuple[int, ...] | None:
    """Return the signed terms of a plain sum: (5, -3, 2) for "5-3+2". None for any other text."""
    match = _SUM.fullmatch(expression)
    if match is None:
        return None
    rest = re.findall(r"([+-])(-?\d+)", match[2])
    return (int(match[1]), *(int(number) if sign == "+" else -int(number) for sign, number in rest))


def parse_factors(expression: str) -> tuple[int, ...] | None:
    """Return the factors of a product without parentheses. None for any other text."""
    if _PRODUCT.fullmatch(expression) is None:
        return None
    return tuple(int(number) for number in expression.split("*"))


def write_working(expression: str, brief: bool = False) -> str | None:
    """Return the working of an expression without spaces; None if it is not a plain sum or product."""
    if (numbers := parse_terms(expression)) is not None:
        width = max(map(len, re.findall(r"\d+", expression)))
        steps = list(_sum_steps(numbers, width))
    elif (numbers := parse_factors(expression)) is not None:
        steps = list(_product_steps(numbers))
    else:
        return None
    parts: list[str] = []
    for columns, value in steps:
        parts.append(",".join(column[-2:] if brief else column for column in columns))
        parts.append(str(value))
    return "/".join(parts[:-1])  # the last value is the answer, which follows the semicolon


def count_carries(a: int, b: int) -> int:
    """Return the number of columns of a + b that carry."""
    columns, _ = _add(abs(a), abs(b), width=1)
    return sum(column[-2] == "1" for column in columns)


def _sum_steps(numbers: tuple[int, ...], width: int) -> Iterator[Step]:
    total = numbers[0]
    for number in numbers[1:]:
        smaller, larger = sorted((abs(total), abs(number)))
        if (total < 0) == (number < 0):
            columns, _ = _add(abs(total), abs(number), width)
        else:
            columns = _subtract(larger, smaller, width)
        total += number
        yield columns, total


def _product_steps(numbers: tuple[int, ...]) -> Iterator[Step]:
    total = numbers[0]
    for number in numbers[1:]:
        sign = -1 if (total < 0) != (number < 0) else 1
        partial_sum = 0
        for place, digit in enumerate(reversed(str(abs(number)))):
            columns, product = _times_digit(abs(total), int(digit))
            shifted = product * 10**place
            yield columns, sign * shifted
            if place > 0:
                columns, partial_sum = _add(partial_sum, shifted, width=1)
                yield columns, sign * partial_sum
            else:
                partial_sum = shifted
        total *= number


def _digit_pairs(a: int, b: int, width: int) -> Iterator[tuple[int, int]]:
    pairs = zip_longest(reversed(f"{a:0{width}}"), reversed(str(b)), fillvalue="0")
    return ((int(x), int(y)) for x, y in pairs)


def _add(a: int, b: int, width: int) -> tuple[list[str], int]:
    columns, carry = [], 0
    for x, y in _digit_pairs(a, b, width):
        total = x + y + carry
        columns.append(f"{x}{y}{carry}{total:02d}")
        carry = total // 10
    return columns, a + b


def _subtract(a: int, b: int, width: int) -> list[str]:
    """Return the columns of a - b, for a >= b >= 0."""
    columns, borrow = [], 0
    for x, y in _digit_pairs(a, b, width):
        digit = x - y - borrow
        next_borrow = int(digit < 0)
        columns.append(f"{x}{y}{borrow}{next_borrow}{digit + 10 * next_borrow}")
        borrow = next_borrow
    return columns


def _times_digit(a: int, digit: int) -> tuple[list[str], int]:
    columns, carry = [], 0
    for x in map(int, reversed(str(a))):
        column = x * digit + carry
        columns.append(f"{x}{digit}{carry}{column:02d}")
        carry = column // 10
    return columns, a * digit
