"""Mathematical expressions: parsed from tokens, and evaluated exactly where the value is rational."""

from __future__ import annotations

import cmath
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from perilune.environments.core.mathematics.tokens import Token

Number = Fraction | complex
_MAX_BITS = 20_000  # of an exact number
_MAX_FACTORIAL = 1000
_CONSTANTS: Mapping[str, complex] = {
    r"\pi": complex(math.pi),
    "e": complex(math.e),
    "i": 1j,
    r"\infty": complex(math.inf),
}
_FUNCTIONS: Mapping[str, Callable[[complex], complex]] = {
    **{
        rf"\{name}": getattr(cmath, name)
        for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "exp", "log")
    },
    **{rf"\arc{name}": getattr(cmath, f"a{name}") for name in ("sin", "cos", "tan")},
    r"\ln": cmath.log,
}
_GREEK_NAMES = "alpha beta gamma delta epsilon theta lambda mu rho sigma tau phi varphi omega"
_GREEK = tuple(f"\\{name}" for name in _GREEK_NAMES.split())
_FACTOR_STARTS = frozenset({"(", "{", r"\frac", r"\sqrt", r"\binom", *_CONSTANTS, *_FUNCTIONS, *_GREEK})
_CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|"}
_END = Token("end", "")


class NotAnExpressionError(ValueError):
    """The tokens are no expression, or its value is too large."""


class Node(NamedTuple):
    """An operation on nodes, or a leaf with a value: a "number" or a "variable"."""

    name: str
    arguments: tuple[Node, ...] = ()
    value: Fraction | str = ""


def parse_expression(tokens: Sequence[Token]) -> Node:
    """Parse all tokens.

    Raises:
        NotAnExpressionError: if they are no expression.
        RecursionError: if they are nested too deeply.
    """
    parser = _Parser(tokens)
    node = parser.parse_sum()
    if parser.next != _END:
        raise NotAnExpressionError(f"unexpected {parser.next.text}")
    return node


class _Parser:
    """Recursive descent, with one method for each level of precedence."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens, self._index = tokens, 0

    @property
    def next(self) -> Token:
        return self._tokens[self._index] if self._index < len(self._tokens) else _END

    def take(self, *texts: str) -> str:
        """Return the next token, if it is one of `texts`; else an empty text."""
        if self.next.kind != "symbol" or self.next.text not in texts:
            return ""
        self._index += 1
        return self._tokens[self._index - 1].text

    def parse_sum(self) -> Node:
        node = self.parse_product()
        while sign := self.take("+", "-"):
            node = Node(sign, (node, self.parse_product()))
        return node

    def parse_product(self) -> Node:
        node = self.parse_signed()
        while True:
            if sign := self.take("*", "/", r"\div"):
                node = Node("*" if sign == "*" else "/", (node, self.parse_signed()))
            elif self.next.text in _FACTOR_STARTS or self.next.text.isalpha() or self._is_mixed(node):
                factor = self.parse_power()
                if factor.name == "number":  # 3 1/2
                    self.take("/")
                    factor = Node("/", (factor, self.parse_power()))
                mixed = node.name == "number" and _is_fraction(factor)
                node = Node("mixed" if mixed else "*", (node, factor))
            else:
                return node

    def _is_mixed(self, node: Node) -> bool:
        """Return whether a whole number and a fraction follow each other, as in 3 1/2."""
        following = [
            token.kind + token.text * (token.kind == "symbol") for token in self._tokens[self._index :][:3]
        ]
        return node.name == "number" and following == ["number", "symbol/", "number"]

    def parse_signed(self) -> Node:
        if self.take("-"):
            return Node("negate", (self.parse_signed(),))
        self.take("+")
        return self.parse_power()

    def parse_power(self) -> Node:
        node = self.parse_atom()
        while self.take("!"):
            node = Node("!", (node,))
        if self.take("^"):
            return Node("^", (node, self.parse_argument()))
        return node

    def parse_argument(self) -> Node:
        """Return the argument of a command, or an exponent."""
        return self.parse_signed() if self.next.text == "-" else self.parse_atom()

    def parse_atom(self) -> Node:
        kind, text = self.next
        self._index += 1
        if kind == "number":
            return Node("number", value=Fraction(text))
        if kind == "symbol" and text in _CLOSING:
            inside = self.parse_sum()
            if not self.take(_CLOSING[text]):
                raise NotAnExpressionError(f"{_CLOSING[text]} is missing")
            return Node("abs", (inside,)) if text == "|" else inside
        if text in (r"\frac", r"\binom", r"\sqrt") or text in _FUNCTIONS:
            return self._parse_command(text)
        if text in _CONSTANTS and self.next.text != "_":
            return Node(text)
        if kind != "symbol" or not (text.isalpha() or text in _GREEK):
            raise NotAnExpressionError(f"unexpected {text or 'end'}")
        if self.take("_"):
            text += "_" + self.next.text
            self._index += 1
        return Node("variable", value=text)

    def _parse_command(self, name: str) -> Node:
        if name == r"\sqrt":
            degree = self.parse_atom() if self.next.text == "[" else Node("number", value=Fraction(2))
            return Node("root", (self.parse_argument(), degree))
        if name not in _FUNCTIONS:
            return Node("/" if name == r"\frac" else "binom", (self.parse_argument(), self.parse_argument()))
        base = (self.parse_argument(),) if name == r"\log" and self.take("_") else ()
        exponent = self.parse_argument() if self.take("^") else None
        node = Node(name, (self.parse_signed(), *base))
        return node if exponent is None else Node("^", (node, exponent))


def _whole_number(node: Node) -> int | None:
    if node.name == "negate":
        return _whole_number(node.arguments[0])
    return int(node.value) if isinstance(node.value, Fraction) and node.value.denominator == 1 else None


def _is_fraction(node: Node) -> bool:
    return node.name == "/" and None not in map(_whole_number, node.arguments)


def find_variables(node: Node) -> frozenset[str]:
    names = {str(node.value)} if node.name == "variable" else set()
    return frozenset(names).union(*map(find_variables, node.arguments))


def count_operations(node: Node) -> int:
    """Count the operations to work out. Signs, mixed numbers, reduced fractions and 1.2 * 10^5 are none."""
    first, *others = node.arguments or (node,)
    if _is_fraction(node):
        top, bottom = (_whole_number(argument) or 0 for argument in node.arguments)
        return int(math.gcd(top, bottom) > 1)
    if node.name == "*" and first.name == "number" and others[0].name == "^":
        base, exponent = others[0].arguments
        if base.value == 10 and not count_operations(exponent) and 1 <= evaluate(first, {}).real < 10:
            return 0
    inner = sum(map(count_operations, node.arguments))
    return inner + (bool(node.arguments) and node.name not in ("negate", "mixed"))


def evaluate(node: Node, values: Mapping[str, Fraction]) -> Number:
    """Return the value, exact if all operations are rational.

    Raises:
        NotAnExpressionError: if an exact number is too large.
        ArithmeticError, ValueError: where the expression has no value.
    """
    if isinstance(node.value, Fraction):
        return node.value
    if node.name == "variable":
        return values[str(node.value)]
    if node.name in _CONSTANTS:
        return _CONSTANTS[node.name]
    result = _OPERATIONS[node.name](*(evaluate(argument, values) for argument in node.arguments))
    if isinstance(result, Fraction) and _bit_length(result) > _MAX_BITS:
        raise NotAnExpressionError("the number is too large")
    return result


def _bit_length(number: Fraction) -> int:
    return max(number.numerator.bit_length(), number.denominator.bit_length())


def _require_small_integer(value: Number) -> int:
    if not (isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= _MAX_FACTORIAL):
        raise NotAnExpressionError("not a small whole number")
    return int(value)


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, complex) or isinstance(exponent, complex):
        return complex(base) ** complex(exponent)
    if abs(exponent.numerator) * _bit_length(base) > _MAX_BITS:
        raise NotAnExpressionError("the number is too large")
    if exponent.denominator == 1:
        return base ** int(exponent)
    return _root(base**exponent.numerator, Fraction(exponent.denominator))


def _root(radicand: Number, degree: Number) -> Number:
    """Return a root; exact if the radicand is the power of a rational number."""
    if (
        isinstance(radicand, Fraction)
        and isinstance(degree, Fraction)
        and degree.denominator == 1
        and 0 < degree < 100
    ):
        exact = [_whole_root(part, int(degree)) for part in (abs(radicand.numerator), radicand.denominator)]
        if exact[0] is not None and exact[1] is not None and (radicand >= 0 or degree % 2):
            return Fraction(exact[0], exact[1]) * (1 if radicand >= 0 else -1)
        if radicand < 0 and degree % 2:
            return -(complex(-radicand) ** (1 / complex(degree)))
    return complex(radicand) ** (1 / complex(degree))


def _whole_root(number: int, degree: int) -> int | None:
    guess = math.isqrt(number) if degree == 2 else round(float(number) ** (1 / degree))
    return guess if guess**degree == number else None


_OPERATIONS: Mapping[str, Callable[..., Number]] = {
    "+": operator.add,
    "mixed": operator.add,
    "-": operator.sub,
    "negate": operator.neg,
    "*": operator.mul,
    "/": operator.truediv,
    "^": _power,
    "root": _root,
    "abs": lambda x: abs(x) if isinstance(x, Fraction) else complex(abs(x)),
    "!": lambda x: Fraction(math.factorial(_require_small_integer(x))),
    "binom": lambda n, k: Fraction(math.comb(_require_small_integer(n), _require_small_integer(k))),
    **{
        name: lambda *arguments, function=function: function(*map(complex, arguments))
        for name, function in _FUNCTIONS.items()
    },
}
