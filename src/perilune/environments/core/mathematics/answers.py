"""The structure of mathematical answers: quantities, words, tuples, sets, intervals, matrices, equations."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from perilune.environments.core.mathematics.expression import Node, parse
from perilune.environments.core.mathematics.tokens import Token

_CLOSING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\langle": r"\rangle", r"\begin": r"\end"}
_SEPARATORS = frozenset({",", ";", "and", "or", r"\cup"})
_REVERSED = {">": "<", r"\ge": r"\le"}
_RELATIONS = frozenset({"=", "<", r"\le", *_REVERSED})
_SIGNS = ({r"\pm": "+", r"\mp": "-"}, {r"\pm": "-", r"\mp": "+"})
_MULTIPLES = frozenset({"hundred", "thousand", "million", "billion", "trillion", "dozen"})
_NAME = re.compile(r"\\?[^\W\d_]+(?:_\w+)?(?:\([^\W\d_]\))?")
_INFINITY = Token("symbol", r"\infty")

Tokens = Sequence[Token]


class Answer(NamedTuple):
    """An answer.

    Attributes:
        kind: "quantity"; "words"; "set", whose items have no order; "="; or, for items with an order, the
            brackets of a tuple or interval, "matrix", or the relations of an inequality.
        text: the unit of a quantity; the words; the name on the left of an equation.
    """

    kind: str
    items: tuple[Answer, ...] = ()
    node: Node = Node("")
    text: str = ""


def read(tokens: Tokens) -> Answer:
    """Read an answer.

    Raises:
        NotAnExpressionError: if a part of it is no expression.
        RecursionError: if it is nested too deeply.
    """
    if len(tokens) > 2 and tokens[1].text == r"\in":
        tokens = tokens[2:]
    if any(one.text in _SIGNS[0] for one in tokens):
        return _items(
            "set", [[Token(kind, signs.get(text, text)) for kind, text in tokens] for signs in _SIGNS]
        )
    parts, _ = _split(tokens, _SEPARATORS)
    if len(parts) > 1:
        return _items("set", parts)
    parts, relations = _split(tokens, _RELATIONS)
    if relations:
        return _relation(parts, relations)
    return _bracketed(tokens) or _quantity(tokens)


def _items(kind: str, parts: Collection[Tokens]) -> Answer:
    return Answer(kind, tuple(map(read, parts)))


def _split(tokens: Tokens, separators: Collection[str]) -> tuple[list[Tokens], list[str]]:
    """The parts between separators outside of brackets, and the separators."""
    parts: list[Tokens] = []
    found: list[str] = []
    depth = begin = 0
    for place, (_, text) in enumerate(tokens):
        depth += (text in _CLOSING) - (text in _CLOSING.values())
        if text in separators and depth == 0:
            parts.append(tokens[begin:place])
            found.append(text)
            begin = place + 1
    return [*parts, tokens[begin:]], found


def _relation(parts: Sequence[Tokens], relations: Sequence[str]) -> Answer:
    """An equation, or an inequality. One that bounds a single name is an interval."""
    names = ["".join(one.text for one in part) for part in parts]
    if relations == ["="]:
        is_name = _NAME.fullmatch(names[0]) is not None
        return Answer("=", tuple(map(read, parts)), text=names[0] if is_name else "")
    if all(one in _REVERSED for one in relations):
        parts, names = parts[::-1], names[::-1]
        relations = [_REVERSED[one] for one in reversed(relations)]
    if "=" not in relations:
        if len(names) == 2 and _NAME.fullmatch(names[0]):
            parts, names, relations = (
                [[Token("symbol", "-"), _INFINITY], *parts],
                ["", *names],
                ["<", *relations],
            )
        elif len(names) == 2 and _NAME.fullmatch(names[1]):
            parts, names, relations = [*parts, [_INFINITY]], [*names, ""], [*relations, "<"]
        if len(names) == 3 and _NAME.fullmatch(names[1]):
            brackets = ("(" if relations[0] == "<" else "[") + (")" if relations[1] == "<" else "]")
            return _items(brackets, [parts[0], parts[2]])
    return _items(" ".join(relations), parts)


def _bracketed(tokens: Tokens) -> Answer | None:
    """A tuple, an interval, a set or a matrix in brackets; None for other tokens."""
    first, last = (tokens[0].text, tokens[-1].text) if tokens else ("", "")
    if first == r"\begin" and len(tokens) > 7 and tokens[2].text.endswith("matrix"):
        rows, _ = _split(tokens[4:-4], {r"\cr"})
        return Answer("matrix", tuple(_items("row", _split(row, {"&"})[0]) for row in rows if row))
    if first not in _CLOSING or last not in _CLOSING.values() or len(_split(tokens[:-1], {last})[0]) > 1:
        return None
    parts, found = _split(tokens[1:-1], _SEPARATORS)
    if first == r"\{":
        return _items("set", parts)
    return _items(first + last, parts) if found else None


def _quantity(tokens: Tokens) -> Answer:
    """An expression with a unit, or words."""
    unit = next(
        (n for n, one in enumerate(tokens) if one.kind == "word" or one.text == "%" or _is_base(tokens, n)),
        None,
    )
    if unit == 0 or any(one.text in _MULTIPLES for one in tokens):
        return Answer("words", text="".join(one.text for one in tokens).lower())
    text = "".join(one.text for one in tokens[unit:] if one.text not in "{}") if unit else ""
    return Answer(
        "quantity", node=parse(tokens[:unit]), text="%" if text == "percent" else text.removesuffix("s")
    )


def _is_base(tokens: Tokens, place: int) -> bool:
    """Whether a token begins the base of a number, as in 1011_2."""
    return tokens[place].text == "_" and place > 0 and tokens[place - 1].kind == "number"
