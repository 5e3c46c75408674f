"""Checks reasoning-gym answers without the family's own scorer.

An audit of a scorer needs a second opinion that shares no code with it. Where only one answer is right, the
check compares with the stated one. Where several are right, it applies the puzzle's rules, implemented again
here. The remaining families have no second opinion. If a scorer is known to give full reward to wrong
answers, the second opinion decides.
"""

import ast
import json
import math
import operator
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

_MULTI_ANSWER_NAMES = """
boxnet codeio countdown cryptarithm graph_color group_anagrams intermediate_integration jugs kakurasu
knight_swap knights_knaves n_queens palindrome_generation palindrome_partitioning polynomial_equations
polynomial_multiplication propositional_logic puzzle24 quantum_lock rubiks_cube rush_hour shortest_path
simple_integration sokoban survo tower_of_hanoi word_ladder
"""
MULTI_ANSWER_FAMILIES = frozenset(_MULTI_ANSWER_NAMES.split())
"""Families with several right answers. Those without an entry in `_RULES` have no second opinion."""

_NUMBER = re.compile(r"[+-]?(?:(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
_EDGE_CHARS = " .,;:!?\"'`°%$()[]{}"
_UNRELIABLE_NAMES = """
advanced_geometry coin_flip complex_arithmetic cryptarithm fraction_simplification game_of_life
game_of_life_halting gsm_symbolic intermediate_integration letter_jumble number_sorting polynomial_equations
puzzle24 spell_backward time_intervals tower_of_hanoi
"""
UNRELIABLE_FAMILIES = frozenset(_UNRELIABLE_NAMES.split())
"""Families whose scorer gives full reward to clearly wrong answers: other numbers than the given ones, the
answer among others, any number with the same prefix, "nan", or any text if the answer is "False"."""
EQUAL_WITHIN, UNEQUAL_FROM = 1e-6, 0.05  # relative; undecided in between
MAX_ANSWER_CHARS = 20_000  # characters; a longer answer is wrong

_SYNTAX_ERRORS = (ValueError, LookupError, TypeError, AttributeError, SyntaxError)
_NOT_AN_ANSWER = (*_SYNTAX_ERRORS, ArithmeticError, RecursionError, MemoryError)


def is_right(family: str, answer: str, data: Mapping[str, Any]) -> bool | None:
    """Return whether `answer` is right. `data` holds the item's "answer" and its decoded "metadata".

    Returns:
        None if undecidable: the family has several answers and no rules here, states no answer, or the answer
            is a number neither equal to the stated one nor far from it.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    rules = _RULES.get(family)
    if rules is not None:
        try:
            return rules(answer, data["metadata"])
        except _NOT_AN_ANSWER:
            return False
    if data["answer"] is None:
        return None
    is_equal = compare_answers(answer, data["answer"])
    return is_equal or (None if family in MULTI_ANSWER_FAMILIES else is_equal)


def compare_answers(answer: str, stated: str) -> bool | None:
    """Return whether two answers are equal; None if they differ only in form or by a small amount."""
    actual, expected = (" ".join(text.split()).casefold() for text in (answer, stated))
    if actual == expected:
        return True
    if _NUMBER.fullmatch(actual) and _NUMBER.fullmatch(expected):
        return _compare_numbers(actual, expected)
    parts = [[part.strip(_EDGE_CHARS) for part in re.split(r"[\s,:]+", text)] for text in (actual, expected)]
    first, second = ([part for part in words if part] for words in parts)
    may_be_equal = len(first) == len(second) > 0 and all(map(_may_be_equal, first, second))
    return None if may_be_equal else False


def _may_be_equal(given: str, expected: str) -> bool:
    numbers = _NUMBER.fullmatch(given) and _NUMBER.fullmatch(expected)
    return given == expected or bool(numbers and _compare_numbers(given, expected) is not False)


def _compare_numbers(given: str, expected: str) -> bool | None:
    a, b = (float(text.replace(",", "")) for text in (given, expected))
    if re.fullmatch(r"[+-]?\d+", expected):
        return a == b
    difference = abs(a - b) / max(abs(a), abs(b), 1e-12)
    return True if difference <= EQUAL_WITHIN else False if difference >= UNEQUAL_FROM else None


# -- expressions -------------------------------------------------------------------------------------------

_OPERATORS: Mapping[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_FUNCTION_NAMES = ("exp", "log", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "asin", "acos", "atan", "tanh")
_FUNCTIONS = {name: getattr(math, name) for name in _FUNCTION_NAMES}


def _evaluate(node: ast.expr, names: Mapping[str, float], used: list[float]) -> float:
    """Return the value of an arithmetic expression. Appends its numbers to `used`."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            used.append(float(number))
            return float(number)
        case ast.Name(id=name):
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, names, used)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand, names, used)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return float(_OPERATORS[type(op)](_evaluate(left, names, used), _evaluate(right, names, used)))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return float(_FUNCTIONS[name](_evaluate(argument, names, used)))
    raise ValueError("not plain arithmetic")


def _parse_expression(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


def _check_countdown(answer: str, metadata: Mapping[str, Any]) -> bool:
    """Check countdown and puzzle24: every number is used once, and the value is the target (24)."""
    used: list[float] = []
    value = _evaluate(_parse_expression(answer), {}, used)
    is_target = math.isclose(value, float(metadata.get("target", 24)), rel_tol=1e-9)
    return is_target and Counter(used) == Counter(float(number) for number in metadata["numbers"])


_SAMPLE_POINTS = (0.37, 0.81, 1.43, 2.19)


def _is_same_function(
    first: Callable[[float], float],
    second: Callable[[float], float],
    points: Sequence[float] = _SAMPLE_POINTS,
) -> bool:
    compared = 0
    for point in points:
        try:
            a, b = first(point), second(point)
        except (ValueError, ArithmeticError, TypeError):
            continue  # outside the real domain of one function
        compared += 1
        if not math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-5):
            return False
    return compared > 0


def _check_antiderivative(answer: str, metadata: Mapping[str, Any]) -> bool:
    """Check that the derivative of the answer, by central differences, is the integrand."""
    variable, (expression, integrand) = (
        metadata["variable"],
        map(_parse_expression, (answer, metadata["integrand"])),
    )
    constants = dict.fromkeys(string.ascii_letters, 0.5) | {"E": math.e, "pi": math.pi}

    def slope(x: float, h: float = 1e-5) -> float:
        ends = (_evaluate(expression, constants | {variable: x + s}, []) for s in (h, -h))
        return (next(ends) - next(ends)) / (2 * h)

    return _is_same_function(slope, lambda x: _evaluate(integrand, constants | {variable: x}, []))


def _check_polynomial(answer: str, metadata: Mapping[str, Any]) -> bool:
    """Check that the answer is expanded and equals the product at more points than its degree."""
    expression, product = map(_parse_expression, (answer, metadata["polynomial_expr"]))
    if any(_contains_sum(node) for node in ast.walk(expression) if _is_product(node)):
        return False

    def value(node: ast.expr, x: float) -> float:
        names = {name: x * (1 + 0.17 * index) for index, name in enumerate(metadata["variables"])}
        return _evaluate(node, names, [])

    points = [0.31 + 0.23 * index for index in range(16)]
    return _is_same_function(lambda x: value(expression, x), lambda x: value(product, x), points)


def _is_product(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Pow)


def _contains_sum(product: ast.AST) -> bool:
    inside = (node.op for node in ast.walk(product) if isinstance(node, ast.BinOp))
    return any(isinstance(op, ast.Add | ast.Sub) for op in inside)


# -- puzzles -----------------------------------------------------------------------------------------------


def _check_queens(answer: str, metadata: Mapping[str, Any]) -> bool:
    board = [line.split() for line in answer.strip().splitlines()]
    puzzle = metadata["puzzle"]
    size = len(puzzle)
    if [len(row) for row in board] != [size] * size or {cell for row in board for cell in row} - {"Q", "_"}:
        return False
    queens = [(r, c) for r in range(size) for c in range(size) if board[r][c] == "Q"]
    keeps_given = all(board[r][c] == "Q" for r in range(size) for c in range(size) if puzzle[r][c] == "Q")
    lines = (
        [r for r, _ in queens],
        [c for _, c in queens],
        [r + c for r, c in queens],
        [r - c for r, c in queens],
    )
    return keeps_given and len(queens) == size and all(len(set(line)) == size for line in lines)


def _check_palindrome(answer: str, metadata: Mapping[str, Any]) -> bool:
    word = answer.strip()
    return word == word[::-1] and Counter(word) == Counter(metadata["letters"])


def _check_hanoi(answer: str, metadata: Mapping[str, Any]) -> bool:
    pegs: dict[int, list[int]] = {peg: [] for peg in range(1, metadata["num_pegs"] + 1)}
    pegs[metadata["start_peg"]] = list(range(metadata["num_disks"], 0, -1))
    for line in answer.strip().splitlines():
        move = re.fullmatch(r"Move disk (\d+) from Peg (\d+) to Peg (\d+)", line.strip(), re.ASCII)
        if move is None:
            return False
        disk, source, target = map(int, move.groups())
        if pegs[source][-1] != disk or (pegs[target] and pegs[target][-1] < disk):
            return False
        pegs[target].append(pegs[source].pop())
    return bool(len(pegs[metadata["target_peg"]]) == metadata["num_disks"])


def _check_coloring(answer: str, metadata: Mapping[str, Any]) -> bool:
    puzzle = metadata["puzzle"]
    colors = {int(vertex): color for vertex, color in json.loads(answer).items()}
    if set(colors) != set(puzzle["vertices"]) or not set(colors.values()) <= set(puzzle["color_options"]):
        return False
    return all(colors[a] != colors[b] for a, b in puzzle["edges"])


def _check_cryptarithm(answer: str, metadata: Mapping[str, Any]) -> bool:
    pairs = [pair.strip().split("=") for pair in answer.strip().split(",")]
    digits = {letter: int(digit) for letter, digit in pairs}
    words = [*metadata["words_letters"], metadata["result_letters"]]
    if len(pairs) != len(digits) or set(digits) != set("".join(words)):
        return False
    if len(set(digits.values())) != len(digits) or not set(digits.values()) <= set(range(10)):
        return False
    if not metadata["allow_leading_zero"] and any(digits[word[0]] == 0 for word in words):
        return False
    *terms, total = (int("".join(str(digits[letter]) for letter in word)) for word in words)
    return sum(terms) == total


def _check_jugs(answer: str, metadata: Mapping[str, Any]) -> bool:
    capacity = metadata["puzzle"]["jug_capacities"]
    levels = [0] * len(capacity)
    for move in json.loads(answer):
        verb, _, rest = move.strip().partition(" ")
        jugs = ["ABCDEFGHIJ".index(name) for name in rest.split("->")]
        if verb == "fill" and len(jugs) == 1:
            levels[jugs[0]] = capacity[jugs[0]]
        elif verb == "empty" and len(jugs) == 1:
            levels[jugs[0]] = 0
        elif verb == "pour" and len(jugs) == 2 and jugs[0] != jugs[1]:
            source, target = jugs
            moved = min(levels[source], capacity[target] - levels[target])
            levels[source], levels[target] = levels[source] - moved, levels[target] + moved
        else:
            return False
    return metadata["puzzle"]["target"] in levels


def _check_anagrams(answer: str, metadata: Mapping[str, Any]) -> bool:
    groups = [sorted(group) for group in json.loads(answer)]
    return sorted(groups) == sorted(sorted(group) for group in metadata["solution"])


def _check_fraction(answer: str, metadata: Mapping[str, Any]) -> bool:
    form = r"\$?\\[dt]?frac\{(\d+)\}\{(\d+)\}\$?|\$?(\d+)/(\d+)\$?"
    match = re.fullmatch(form, answer.strip(), re.ASCII)
    numbers = [int(digits) for digits in match.groups() if digits] if match else []
    return numbers == [metadata["simplified_numerator"], metadata["simplified_denominator"]]


def _check_factors(answer: str, metadata: Mapping[str, Any]) -> bool:
    return sorted(map(int, re.split(r"[×x*]", answer))) == sorted(metadata["factors"])


def _check_probability(answer: str, metadata: Mapping[str, Any]) -> bool:
    rational = metadata["rational"]
    exact = Fraction(rational["numerator"], rational["denominator"])
    return abs(Fraction(answer.strip()) - exact) <= exact / 1000


def _check_complex(answer: str, metadata: Mapping[str, Any]) -> bool:
    text = answer.strip().replace(" ", "").replace("i", "j")
    if re.fullmatch(r"[-+.\dj]+", text, re.ASCII) is None:
        return False
    return abs(complex(text) - complex(*metadata["result"])) <= 1e-2


def _check_roots(answer: str, metadata: Mapping[str, Any]) -> bool:
    roots = sorted(float(part) for part in answer.split(",")) if answer.strip() else []
    expected = sorted(metadata["real_solutions"])
    return len(roots) == len(expected) and all(
        math.isclose(a, b, rel_tol=1e-2, abs_tol=1e-3) for a, b in zip(roots, expected, strict=True)
    )


_RULES: Mapping[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "countdown": _check_countdown,
    "coin_flip": _check_probability,
    "complex_arithmetic": _check_complex,
    "cryptarithm": _check_cryptarithm,
    "fraction_simplification": _check_fraction,
    "graph_color": _check_coloring,
    "group_anagrams": _check_anagrams,
    "intermediate_integration": _check_antiderivative,
    "jugs": _check_jugs,
    "n_queens": _check_queens,
    "palindrome_generation": _check_palindrome,
    "polynomial_equations": _check_roots,
    "polynomial_multiplication": _check_polynomial,
    "prime_factorization": _check_factors,
    "puzzle24": _check_countdown,
    "simple_integration": _check_antiderivative,
    "tower_of_hanoi": _check_hanoi,
}
