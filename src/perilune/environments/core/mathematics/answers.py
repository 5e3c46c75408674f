"""The structure of mathematical answers: quantities, words, tuples, sets, intervals, matrices, equations."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from perilune.environments.core.mathematics.expression import Node, parse_expression
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


def parse_answer(tokens: Tokens) -> Answer:
    """Read an answer.

    Raises:
        NotAnExpressionError: if a part of it is no expression.
        RecursionError: if it is nested too deeply.
    """
    if len(tokens) > 2 and tokens[1].text == r"\in":
        tokens = tokens[2:]
    if any(token.text in _SIGNS[0] for token in tokens):
        return _group(
            "set", [[Token(kind, signs.get(text, text)) for kind, text in tokens] for signs in _SIGNS]
        )
    parts, _ = _split_tokens(tokens, _SEPARATORS)
    if len(parts) > 1:
        return _group("set", parts)
    parts, relations = _split_tokens(tokens, _RELATIONS)
    if relations:
        return _parse_relation(parts, relations)
    return _parse_bracketed(tokens) or _parse_quantity(tokens)


def _group(kind: str, parts: Collection[Tokens]) -> Answer:
    return Answer(kind, tuple(map(parse_answer, parts)))


def _split_tokens(tokens: Tokens, separators: Collection[str]) -> tuple[list[Tokens], list[str]]:
    """Return the parts between separators outside of brackets, and the separators."""
    parts: list[Tokens] = []
    separators_found: list[str] = []
    depth = begin = 0
    for index, (_, text) in enumerate(tokens):
        depth += (text in _CLOSING) - (text in _CLOSING.values())
        if text in separators and depth == 0:
            parts.append(tokens[begin:index])
            separators_found.append(text)
            begin = index + 1
    return [*parts, tokens[begin:]], separators_found


def _parse_relation(parts: Sequence[Tokens], relations: Sequence[str]) -> Answer:
    """Return an equation, or an inequality. One that bounds a single name is an interval."""
    names = ["".join(name.text for name in part) for part in parts]
    if relations == ["="]:
        is_name = _NAME.fullmatch(names[0]) is not None
        return Answer("=", tuple(map(parse_answer, parts)), text=names[0] if is_name else "")
    if all(name in _REVERSED for name in relations):
        parts, names = parts[::-1], names[::-1]
        relations = [_REVERSED[name] for name in reversed(relations)]
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
            return _group(brackets, [parts[0], parts[2]])
    return _group(" ".join(relations), parts)


def _parse_bracketed(tokens: Tokens) -> Answer | None:
    """Return a tuple, an interval, a set or a matrix in brackets; None for other tokens."""
    first, last = (tokens[0].text, tokens[-1].text) if tokens else ("", "")
    if first == r"\begin" and len(tokens) > 7 and tokens[2].text.endswith("matrix"):
        rows, _ = _split_tokens(tokens[4:-4], {r"\cr"})
        return Answer("matrix", tuple(_group("row", _split_tokens(row, {"&"})[0]) for row in rows if row))
    if (
        first not in _CLOSING
        or last not in _CLOSING.values()
        or len(_split_tokens(tokens[:-1], {last})[0]) > 1
    ):
        return None
    parts, separators = _split_tokens(tokens[1:-1], _SEPARATORS)
    if first == r"\{":
        return _group("set", parts)
    return _group(first + last, parts) if separators else None


def _parse_quantity(tokens: Tokens) -> Answer:
    """Return an expression with a unit, or words."""
    unit = next(
        (
            n
            for n, token in enumerate(tokens)
            if token.kind == "word" or token.text == "%" or _is_base(tokens, n)
        ),
        None,
    )
    if unit == 0 or any(token.text in _MULTIPLES for token in tokens):
        return Answer("words", text="".join(token.text for token in tokens).lower())
    text = "".join(token.text for token in tokens[unit:] if token.text not in "{}") if unit else ""
    return Answer(
        "quantity",
        node=parse_expression(tokens[:unit]),
        text="%" if text == "percent" else text.removesuffix("s"),
    )


def _is_base(tokens: Tokens, index: int) -> bool:
    """Return whether a token begins the base of a number, as in 1011_2."""
    return tokens[index].text == "_" and index > 0 and tokens[index - 1].kind == "number"
