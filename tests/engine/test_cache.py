"""Memory that is taken again, and a cache that grows without losing anything."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from perilune.engine.cache import KVCache, Memory
from perilune.models.config import PRESETS

CONFIG = PRESETS["tiny"].replace(num_heads=4, num_kv_heads=2)


def memory() -> Memory:
    return Memory(torch.device("cpu"), torch.float32)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(1, 4))
def test_what_is_stored_survives_growth_and_moves(lengths: list[int], slots: int) -> None:
    cache = KVCache(CONFIG, slots, memory())
    keys = torch.randn(sum(lengths), slots, 2, 32)
    stored = 0
    for length in lengths:
        cache.reserve(stored + length, slots)
        for position in range(stored, stored + length):
            at = torch.full((slots,), position)
            cache.store(1, cache.places(at), keys[position], -keys[position])
        stored += length
    cache.move(torch.tensor([slots - 1]), torch.tensor([0]), stored)
    keys[:, 0] = keys[:, slots - 1]
    assert torch.equal(cache.keys[1, ..., :stored], keys.permute(1, 2, 3, 0))
    assert torch.equal(cache.values[1, :, :, :stored], -keys.permute(1, 2, 0, 3))


def test_memory_is_taken_again() -> None:
    pool = memory()
    first = pool.take(100)
    place = first.data_ptr()
    pool.give(first)
    assert pool.take(60).data_ptr() == place
    assert pool.take(60).data_ptr() != place


def test_buffers_that_are_too_small_are_let_go() -> None:
    pool = memory()
    pool.give(pool.take(10))
    large = pool.take(1000)
    assert not large.any()
    assert pool.take(10).numel() == 10
