"""`well_formed` rejects text that could be code or could stall the matcher."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.environments.adapters.answer_form import is_well_formed

EVALUATED = (
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication",
    "puzzle24", "simple_integration", "spiral_matrix", "string_insertion",
)  # fmt: skip
CODE = (
    "__import__('os').getpid()*0+1", "exec('1')", "open('x','w')", "x.real", "(1).__class__", "a_b", "os(1)",
    "lambda x: x", "[1 for _ in ()]", "'A'", "x;y", "x\\n", "{1:2}", "Integral(x, x)", "Symbol(x)",
)  # fmt: skip
POWERS = ("9**9**9", "2**999", "9**(9)**9", "2**(10)**(10)", "E**E**9", "x**100")


@pytest.mark.parametrize("family", EVALUATED)
@pytest.mark.parametrize("text", [*CODE, *POWERS])
def test_well_formed_rejects_code_and_nested_powers(family, text):
    assert not is_well_formed(family, text, None)


@given(st.text(alphabet="x1+-*/() ", max_size=60))
def test_well_formed_expressions_contain_only_numbers_and_operators(text):
    if is_well_formed("countdown", text, None):
        assert set(text) <= set("0123456789+-*/() ") and "**" not in text


@pytest.mark.parametrize("family", EVALUATED)
def test_well_formed_rejects_long_hostile_text_quickly(family):
    for part in ("1", "1 ", "x*", "Q ", "(", "2**", "sin(", "E**("):
        text = part * (4000 // len(part)) + "!"
        begun = time.process_time()
        assert not is_well_formed(family, text, None)
        assert time.process_time() - begun < 0.3


@pytest.mark.parametrize(
    ("family", "answer", "gold", "expected"),
    [
        ("countdown", "39 - 14 + 93 + 51", "39 - 14 + 93 + 51", True),
        ("countdown", "(3+4)*2/1", "14", True),
        ("simple_integration", "-2*X**9 + 7*X**8 - 2*X + C", "x", True),
        ("intermediate_integration", "2*(2 - 8*x)**(3/2)/3 + C", "x", True),
        ("intermediate_integration", "-3*x**2*sin(x) + E**(x) + C", "x", True),
        ("polynomial_multiplication", "-701220*x**7 - 658068*x**5", "x", True),
        ("n_queens", "_ Q _\nQ _ _", "_ Q _\nQ _ _", True),
        ("spiral_matrix", "1 2 -3", "1 2 3", True),
        ("chain_sum", "615", "615", True),
        ("chain_sum", "-615", "615", True),
        ("chain_sum", "1,615", "615", True),
        ("chain_sum", "0615", "615", False),
        ("chain_sum", "+615", "615", False),
        ("chain_sum", "615 ", "615", False),
        ("chain_sum", "61٥", "615", False),
        ("chain_sum", "the answer is 615", "615", False),
        ("chain_sum", "", "615", False),
        ("decimal_chain_sum", "-127.21", "-127.2111", True),
        ("decimal_chain_sum", "nan", "-127.2111", False),
        ("game_of_life_halting", "xyzzy", "False", False),
        ("game_of_life_halting", "true", "False", True),
        ("spell_backward", "cba", "abc", True),
        ("spell_backward", "a\x00b", "abc", False),
        ("spell_backward", "a" * 1000, "abc", False),
    ],
)
def test_well_formed_checks_answer_form_of_family(family, answer, gold, expected):
    assert is_well_formed(family, answer, gold) is expected
