"""The Triton attention kernels: in Triton's interpreter if TRITON_INTERPRET=1, otherwise on a GPU.

`test_triton_attention.py` runs this file in a separate process, because Triton reads the variable on import.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_samples import DEVICE, check_samples

from perilune.engine.graph_runner import GraphRunner
from perilune.engine.native_runner import CacheKind
from perilune.engine.runner import TorchRunner
from perilune.errors import RequestError
from perilune.models import triton_attention
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder
from perilune.models.triton_attention import LayerCache, attend, store

PART = triton_attention.PART = 64  # several parts with few keys
LENGTHS = st.one_of(st.integers(1, 3 * PART), st.sampled_from([PART, PART + 1, 2 * PART, 17 * PART + 3]))
EXAMPLES = 8 if DEVICE == "cuda" else 4  # the interpreter is slow
few = settings(
    deadline=None, max_examples=EXAMPLES, derandomize=True, phases=[Phase.explicit, Phase.generate]
)


@dataclass
class Case:
    """Sequences of some lengths in a cache of random blocks; their last tokens are the queries."""

    lengths: list[int]
    kv_heads: int
    group: int
    size: int
    dtype: torch.dtype
    seed: int

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        columns = -(-max(self.lengths) // 16)
        tables = 1 + rng.permutation(columns * len(self.lengths)).reshape(len(self.lengths), columns)
        self.tables = torch.from_numpy(tables.astype(np.int32))
        self.positions = torch.tensor(self.lengths, dtype=torch.int32) - 1
        layout = (tables.size + 1, self.kv_heads)
        if self.dtype == torch.int8:
            # Scaled to about unit variance.
            keys, values = (torch.randint(-127, 128, (2, *layout, self.size, 16), generator=generator)).char()
            scales = (0.5 + torch.rand(2, *layout, 16, generator=generator)) / 64
            self.cache = LayerCache(keys, values.view(*layout, 16, self.size), scales[0], scales[1])
        else:
            keys, values = torch.randn(2, *layout, self.size, 16, generator=generator).to(self.dtype)
            self.cache = LayerCache(keys, values.view(*layout, 16, self.size))
        self.compute = torch.float32 if self.dtype == torch.int8 else self.dtype
        q = torch.randn(len(self.lengths), self.kv_heads * self.group, self.size, generator=generator)
        self.q = q.to(self.compute)
        parts = (self.cache.keys, self.cache.values, self.cache.key_scales, self.cache.value_scales)
        self.cache = LayerCache(*(None if part is None else part.to(DEVICE) for part in parts))
        self.q, self.tables, self.positions = (
            tensor.to(DEVICE) for tensor in (self.q, self.tables, self.positions)
        )

    def expected(self, window: int | None) -> Tensor:
        """Attention from its definition, in float64."""
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=DEVICE)
        for sequence, length in enumerate(self.lengths):
            positions = torch.arange(max(0, length - window) if window else 0, length, device=DEVICE)
            blocks, within = self.tables[sequence, positions // 16].long(), positions % 16
            k = self.cache.keys[blocks, :, :, within].double()
            v = self.cache.values[blocks, :, within].double()
            if self.cache.key_scales is not None and self.cache.value_scales is not None:
                k = k * self.cache.key_scales[blocks, :, within].double()[..., None]
                v = v * self.cache.value_scales[blocks, :, within].double()[..., None]
            for head in range(self.q.shape[1]):
                of = head // self.group
                scores = k[:, of] @ self.q[sequence, head].double() / math.sqrt(self.size)
                out[sequence, head] = scores.softmax(0) @ v[:, of]
        return out


@st.composite
def cases(draw: st.DrawFn, *dtypes: torch.dtype) -> Case:
    return Case(
        draw(st.lists(LENGTHS, min_size=1, max_size=3)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 2, 5])),
        draw(st.sampled_from([16, 32, 80])),
        draw(st.sampled_from(dtypes)),
        draw(st.integers(0, 2**32 - 1)),
    )


windows = st.one_of(st.none(), st.integers(1, 40), st.sampled_from([PART, PART + 1, 3 * PART]))


@few
@given(cases(torch.float32, torch.int8), windows)
def test_attend_equals_the_definition(case: Case, window: int | None) -> None:
    found = attend(case.q, case.cache, case.tables, case.positions, window)
    torch.testing.assert_close(found.double(), case.expected(window), atol=2e-5, rtol=2e-5)


@few
@given(cases(torch.bfloat16), windows)
def test_attend_in_bfloat16_is_close_to_the_definition(case: Case, window: int | None) -> None:
    found = attend(case.q, case.cache, case.tables, case.positions, window)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), case.expected(window), atol=0.03, rtol=0.03)
    wide = attend(case.q.float(), case.cache, case.tables, case.positions, window)
    torch.testing.assert_close(wide, found.float(), atol=1e-6, rtol=2**-7)


@few
@given(cases(torch.float32, torch.bfloat16, torch.int8), windows, st.integers(0, 40))
def test_attend_rows_do_not_depend_on_other_rows_or_table_width(
    case: Case, window: int | None, wider: int
) -> None:
    together = attend(case.q, case.cache, case.tables, case.positions, window)
    for row, length in enumerate(case.lengths):
        own = case.tables[row : row + 1, : -(-length // 16)]
        table = torch.nn.functional.pad(own, (0, wider))
        rows = slice(row, row + 1)
        alone = attend(case.q[rows], case.cache, table, case.positions[rows], window)
        assert torch.equal(alone, together[rows])


@few
@given(cases(torch.float32, torch.bfloat16))
def test_store_writes_keys_and_values_to_their_places(case: Case) -> None:
    k, v = torch.randn(2, len(case.lengths), case.kv_heads, case.size).to(DEVICE, case.compute)
    keys, values = case.cache.keys.clone(), case.cache.values.clone()
    store(k, v, case.cache, case.tables, case.positions)
    for row, length in enumerate(case.lengths):
        block, within = case.tables[row, (length - 1) // 16], (length - 1) % 16
        keys[block, :, :, within], values[block, :, within] = k[row], v[row]
    assert torch.equal(case.cache.keys, keys)
    assert torch.equal(case.cache.values, values)


@few
@given(cases(torch.int8))
def test_int8_store_rounding_error_is_at_most_half_a_step(case: Case) -> None:
    k, v = torch.randn(2, len(case.lengths), case.kv_heads, case.size).to(DEVICE)
    k[0, 0] = 0
    store(k, v, case.cache, case.tables, case.positions)
    cache = case.cache
    assert cache.key_scales is not None and cache.value_scales is not None
    for row, length in enumerate(case.lengths):
        block, within = int(case.tables[row, (length - 1) // 16]), (length - 1) % 16
        for exact, stored, scale in (
            (k[row], cache.keys[block, :, :, within], cache.key_scales[block, :, within]),
            (v[row], cache.values[block, :, within], cache.value_scales[block, :, within]),
        ):
            torch.testing.assert_close(scale, exact.abs().amax(-1).clamp(min=1e-30) / 127)
            error = (stored * scale[:, None] - exact).abs()
            assert (error <= 0.5001 * scale[:, None]).all()


def test_strided_inputs_are_read_in_place() -> None:
    """A captured step stores token, position and blocks of a sample in one row."""
    case = Case([40, 300], 2, 2, 32, torch.float32, 0)
    tokens = torch.zeros_like(case.positions)[:, None]
    inputs = torch.cat([tokens, case.positions[:, None], case.tables], dim=1)
    packed = torch.randn(2, 8, 32).to(DEVICE)
    q, k, v = packed[:, :4], packed[:, 4:6], packed[:, 6:]
    store(k, v, case.cache, inputs[:, 2:], inputs[:, 1])
    case.q = q
    found = attend(q, case.cache, inputs[:, 2:], inputs[:, 1])
    torch.testing.assert_close(found.double(), case.expected(None), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("cache", [None, "int8"])
def test_engine_with_triton_attention_samples_like_torch(cache: CacheKind | None) -> None:
    """Covers windows, chunked prefill beside decoding samples, and blocks in any order."""
    config = PRESETS["tiny"].replace(
        architecture="gemma3_text", windows=(20, None), num_layers=2, initializer_range=0.15
    )
    decoder = Decoder(config)
    decoder.initialize(0)

    def captured(one: Decoder, num_blocks: tuple[int, ...]) -> GraphRunner:
        return GraphRunner(one, num_blocks, cache=cache)

    def gathered(one: Decoder, num_blocks: tuple[int, ...]) -> TorchRunner:
        return TorchRunner(one, num_blocks, None if cache is None else torch.int8)

    check_samples(decoder, gathered, captured)


def test_graph_runner_without_triton_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perilune.engine.graph_runner.has_triton", lambda: False)
    with pytest.raises(RequestError, match="Triton"):
        GraphRunner(Decoder(PRESETS["tiny"]), (4,))
