"""Column arithmetic: examples, and properties of the written working."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.environments.adapters import scratchpad
from perilune.environments.adapters.scratchpad import count_carries, parse_factors, parse_terms, write_working


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("347+268", "78015,46111,32106"),
        ("999+1", "91010,90110,90110"),
        ("047+002", "72009,40004,00000"),
        ("512-348", "28014,14116,53101"),
        ("348-512", "28014,14116,53101"),
        ("5--3", "53008"),
        ("-5-3", "53008"),
        ("1+2+3", "12003/3/33006"),
        ("3-5+4", "53002/-2/42002"),
        ("47*6", "76042,46428"),
        ("47*36", "76042,46428/282/73021,43214/1410/20002,81009,24006,01001"),
        ("-4*12", "42008/-8/41004/-40/80008,04004"),
        ("7", ""),
    ],
)
def test_working_writes_column_arithmetic(expression, expected):
    assert write_working(expression) == expected


def test_brief_working_keeps_result_of_each_column():
    assert write_working("347+268", brief=True) == "15,11,06"
    assert write_working("1+2+3", brief=True) == "03/3/06"


@pytest.mark.parametrize(
    "expression", ["", "a+b", "1/2", "(1+2)", "1+2*3", "1**2", "1+", "1.5+2", "²+1", "1 + 2"]
)
def test_working_is_none_for_other_expressions(expression):
    assert write_working(expression) is None


numbers = st.integers(-(10**6), 10**6)


def value(groups, base=10):
    """The number formed by the last digits of the columns, preceded by the carry of the last column."""
    digits = "".join(group[-1] for group in reversed(groups))
    return int(digits) + int(groups[-1][-2]) * base ** len(groups)


@given(st.lists(numbers, min_size=2, max_size=5))
def test_working_of_sums_gives_correct_totals(values):
    expression = str(values[0]) + "".join(f"{'-' if i % 2 else '+'}{v}" for i, v in enumerate(values[1:], 1))
    signed = [v if i % 2 == 0 else -v for i, v in enumerate(values)]
    assert parse_terms(expression) == tuple(signed)
    parts = write_working(expression).split("/")
    totals = [sum(signed[: i + 2]) for i in range(len(signed) - 1)]
    assert [int(total) for total in parts[1::2]] == totals[:-1]
    for columns, total, number in zip(parts[::2], totals, signed[1:], strict=True):
        groups = columns.split(",")
        before = total - number
        if (before < 0) == (number < 0):
            assert value(groups) == abs(total)
        else:
            assert int("".join(group[-1] for group in reversed(groups))) == abs(total)
            assert groups[-1][3] == "0"  # the larger minus the smaller leaves no borrow


@given(st.integers(-9999, 9999), st.integers(-9999, 9999))
def test_working_of_products_gives_correct_result(a, b):
    assert parse_factors(f"{a}*{b}") == (a, b)
    parts = write_working(f"{a}*{b}").split("/")
    last = parts[-1].split(",")
    assert value(last) == abs(a * b)
    for columns, reached in zip(parts[::2], parts[1::2], strict=False):
        assert abs(int(reached)) in (value(columns.split(",")) * 10**place for place in range(5))


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_carries_match_digit_sums(a, b):
    def digit_sum(number):
        return sum(map(int, str(number)))

    assert count_carries(a, b) * 9 == digit_sum(a) + digit_sum(b) - digit_sum(a + b)


def test_every_column_of_difference_balances():
    for group in scratchpad.write_working("1000-1").split(","):
        top, bottom, borrow, owes, digit = map(int, group)
        assert top - bottom - borrow == digit - 10 * owes
