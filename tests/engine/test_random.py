"""Counter-based random numbers: published test vectors, and dependence on their counters alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.engine.random import philox4x32, uniforms

words = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # published with the algorithm (Random123, kat_vectors)
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            [0xFFFFFFFF] * 2,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_matches_published_test_vectors(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    drawn = philox4x32(np.array(counter, dtype=np.uint64), np.array(key, dtype=np.uint64))
    assert drawn.tolist() == expected


def test_uniforms_combine_two_philox_words() -> None:
    drawn = uniforms(np.array([[0, 0, 0, 0]], dtype=np.uint64), np.array([[0]]))
    assert drawn[0, 0] == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53


keys = st.tuples(st.integers(0, 2**64 - 1), words, words, words)


@given(rows=st.lists(keys, min_size=1, max_size=5), start=st.integers(0, 2**31), count=st.integers(1, 9))
def test_uniforms_depend_only_on_their_own_key_and_position(
    rows: list[tuple[int, int, int, int]], start: int, count: int
) -> None:
    positions = np.arange(start, start + count) + np.zeros((len(rows), 1), dtype=np.int64)
    together = uniforms(np.array(rows, dtype=np.uint64), positions)
    assert ((together >= 0) & (together < 1)).all()
    for i, row in enumerate(rows):
        for j in range(count):
            alone = uniforms(np.array([row], dtype=np.uint64), positions[i : i + 1, j : j + 1])
            assert alone[0, 0] == together[i, j]


@given(keys, words, st.integers(0, 4))
def test_uniforms_change_with_every_field_of_key_and_position(
    key: tuple[int, int, int, int], position: int, field: int
) -> None:
    counters = [*key, position]
    other = counters.copy()
    other[field] ^= 1
    drawn = [
        uniforms(np.array([c[:4]], dtype=np.uint64), np.array([[c[4]]])).item() for c in (counters, other)
    ]
    assert drawn[0] != drawn[1]


def test_uniforms_pass_chi_squared_and_correlation_tests() -> None:
    rows = np.array([[5, 1, task, sample] for task in range(50) for sample in range(20)], dtype=np.uint64)
    drawn = uniforms(rows, np.tile(np.arange(100), (1000, 1)))
    counts, _ = np.histogram(drawn, bins=100, range=(0, 1))
    chi_squared = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_squared < 149  # 99.9th percentile with 99 degrees of freedom
    for axis in (0, 1):
        a, b = np.take(drawn, range(99), axis), np.take(drawn, range(1, 100), axis)
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.04
