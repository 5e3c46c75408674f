"""The paged cache: storing, gathering and copying blocks, and memory use."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.engine.cache import CacheSlots, GatherIndices, PagedCache
from perilune.errors import RequestError
from perilune.models.config.decoder_config import PRESETS

CONFIG = PRESETS["tiny"].replace(num_heads=4, num_kv_heads=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4), seed=st.integers(0, 2**32 - 1))
def test_gather_returns_stored_keys_and_values_in_order(
    dtype: torch.dtype, lengths: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    columns = -(-max(lengths) // 16)
    tables = 1 + torch.from_numpy(rng.permutation(columns * len(lengths)).reshape(len(lengths), columns))
    cache = PagedCache(CONFIG, (tables.numel() + 1,), dtype)
    tokens = [(sequence, position) for sequence, n in enumerate(lengths) for position in range(n)]
    sequence, position = torch.from_numpy(rng.permutation(np.array(tokens))).T
    k, v = torch.randn(2, len(tokens), 2, 32)
    cache.store(1, CacheSlots(tables[sequence, position // 16], position % 16, 2), k, v)
    keys, values = cache.gather(1, GatherIndices(tables, 2, 32))
    index = (sequence * 2)[:, None] + torch.arange(2), position[:, None]
    for expected, stored in ((k, keys[index]), (v, values[index])):
        if dtype == torch.int8:
            step = expected.abs().amax(-1, keepdim=True) / 127
            assert ((stored - expected).abs() <= 0.5001 * step).all()
        else:
            assert torch.equal(stored, expected.to(dtype))


def test_copy_moves_blocks_in_all_layers_of_each_pool() -> None:
    mixed = CONFIG.replace(architecture="gemma3_text", windows=(20, None, 20))
    cache = PagedCache(mixed, (6, 5), torch.float32)
    for part in (*cache.keys, *cache.values):
        part.copy_(torch.randn_like(part))
    before = [part.clone() for part in (*cache.keys, *cache.values)]
    sources = np.array([[1, 1, 2], [1, 3, 3]], dtype=np.int32)
    targets = np.array([[3, 4, 5], [2, 4, 1]], dtype=np.int32)
    cache.copy(sources, targets)
    whole, windowed = [0, 1, 2, 1, 1, 2], [0, 3, 1, 3, 3]
    for part, was, order in zip(
        (*cache.keys, *cache.values), before, [windowed, whole, windowed] * 2, strict=True
    ):
        assert torch.equal(part, was[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_size_follows_its_dtype(dtype: torch.dtype) -> None:
    cache = PagedCache(CONFIG, (10,), dtype)
    assert cache.nbytes == 10 * 16 * 2 * CONFIG.num_layers * 2 * 32 * dtype.itemsize
    assert {part.dtype for part in cache.keys} == {dtype}
    assert not any(part.any() for part in cache.keys)


def test_out_of_memory_error_names_cache_device_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(RequestError, match=r"the engine's cache on cuda.*GiB of keys"):
        PagedCache(CONFIG, (1 << 20,), torch.float32, "cuda")
