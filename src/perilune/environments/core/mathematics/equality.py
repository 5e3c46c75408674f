"""Equality of two mathematical answers."""

import cmath
import contextlib
import hashlib
from collections.abc import Sequence
from fractions import Fraction

from perilune.environments.core.mathematics.answers import Answer, parse_answer
from perilune.environments.core.mathematics.expression import (
    Node,
    Number,
    count_operations,
    evaluate,
    find_variables,
)
from perilune.environments.core.mathematics.tokens import tokenize

MAX_ANSWER_CHARS = 2000  # characters of an answer
_POINT_COUNT, _MIN_POINTS = 6, 2
_RELATIVE_TOLERANCE = 1e-9  # relative difference of irrational numbers
_EVALUATION_ERRORS = (ArithmeticError, ValueError, RecursionError)


def is_equal(output: str, answer: str) -> bool:
    """Return whether `output` states the value of the reference answer, in LaTeX or plain text.

    Rational numbers are compared exactly, irrational ones to nine digits, and expressions at random values of
    their variables. If the reference is rational, the output must not leave more operations to work out:
    37*48 is not 1776. Sets and lists without brackets have no order. A unit may be missing but not differ,
    and 50% equals 50 and 1/2. Other text is compared without case and spaces.
    """
    if max(len(output), len(answer)) > MAX_ANSWER_CHARS:
        return False
    mine, right = tokenize(output), tokenize(answer)
    if mine == right:
        return bool(mine)
    words = ["".join(token.text for token in tokens_of_text).lower() for tokens_of_text in (mine, right)]
    if words[0] == words[1] and words[0].isalpha() and any(token.kind == "word" for token in (*mine, *right)):
        return True
    try:
        return _is_same(parse_answer(mine), parse_answer(right), f"{output}\0{answer}")
    except _EVALUATION_ERRORS:
        return False


def _is_same(mine: Answer, right: Answer, key: str) -> bool:
    if mine.kind == right.kind == "=":
        return _are_items_same(mine.items, right.items, key) or _is_same_equation(mine, right, key)
    if "=" in (mine.kind, right.kind):  # x = 5 is 5
        named, other = (mine, right) if mine.kind == "=" else (right, mine)
        sides = (named.items[1], other) if named is mine else (other, named.items[1])
        return bool(named.text) and _is_same(*sides, key)
    if mine.kind != right.kind or len(mine.items) != len(right.items):
        return False
    if mine.kind == "quantity":
        return _is_same_quantity(mine, right, key)
    if mine.kind == "words":
        return mine.text == right.text
    return _are_items_same(mine.items, right.items, key, ordered=mine.kind != "set")


def _are_items_same(
    mine: Sequence[Answer], right: Sequence[Answer], key: str, *, ordered: bool = True
) -> bool:
    """Return whether the items are the same, each of `right` as often as in `mine`."""
    if ordered:
        return all(_is_same(part, other, key) for part, other in zip(mine, right, strict=True))
    remaining = list(right)
    for part in mine:
        match = next((other for other in remaining if _is_same(part, other, key)), None)
        if match is None:
            return False
        remaining.remove(match)
    return not remaining


def _is_same_quantity(mine: Answer, right: Answer, key: str) -> bool:
    if mine.text != right.text:
        if mine.text and right.text:
            return False
        percent = {"%": Fraction(1, 100)}
        scale = percent.get(mine.text, Fraction(1)) / percent.get(right.text, Fraction(1))
        if scale != 1 and _is_same_value(mine.node, right.node, key, scale):
            return True
    return _is_same_value(mine.node, right.node, key)


def _is_same_equation(mine: Answer, right: Answer, key: str) -> bool:
    """Return whether left minus right side of one equation is a multiple of that of the other."""
    if any(item.kind != "quantity" or item.text for item in (*mine.items, *right.items)):
        return False
    sides = [Node("-", (item.items[0].node, item.items[1].node)) for item in (mine, right)]
    values = _evaluate_at_points(sides[0], sides[1], key)
    ratios = [item / other for item, other in values if item != 0 and other != 0]
    return len(ratios) == len(values) > 0 and all(_is_close(ratios[0], item) for item in ratios)


def _is_same_value(mine: Node, right: Node, key: str, scale: Fraction = Fraction(1)) -> bool:
    values = _evaluate_at_points(mine, right, key)
    if not values or not all(_is_close(x if scale == 1 else x * scale, y) for x, y in values):
        return False
    if not find_variables(right) and isinstance(values[0][1], Fraction):
        return isinstance(values[0][0], Fraction) and count_operations(mine) <= count_operations(right)
    return True


def _evaluate_at_points(mine: Node, right: Node, key: str) -> list[tuple[Number, Number]]:
    """Return the values of two expressions at points where both have one; none if their variables differ.

    The points depend on both texts, so that no output can be written for them.
    """
    names = find_variables(mine)
    values: list[tuple[Number, Number]] = []
    for number in range(_POINT_COUNT if names else 1) if names == find_variables(right) else ():
        point = {name: _draw_value(f"{number}/{name}/{key}") for name in names}
        with contextlib.suppress(*_EVALUATION_ERRORS):
            values.append((evaluate(mine, point), evaluate(right, point)))
    return values if len(values) >= (_MIN_POINTS if names else 1) else []


def _draw_value(key: str) -> Fraction:
    digest = hashlib.sha256(key.encode("utf-8", "replace")).digest()
    size = Fraction(1 + int.from_bytes(digest[:2], "big") % 300, 101)
    return -size if digest[2] % 2 else size


def _is_close(one: Number, other: Number) -> bool:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    return cmath.isclose(complex(one), complex(other), rel_tol=_RELATIVE_TOLERANCE, abs_tol=1e-15)
