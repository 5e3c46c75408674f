"""Linear attention in engine and learner: recurrent state with prefix caching, chunks and shared prompts."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from perilune.engine.engine import Engine
from perilune.engine.offload import OffloadSettings
from perilune.engine.request import Prompt, SamplingParams
from perilune.engine.speculation import SpeculationSettings
from perilune.errors import RequestError
from perilune.models.attention import PackedAttention
from perilune.models.config.decoder_config import PRESETS
from perilune.models.config.layer_kinds import DeltaRule
from perilune.models.decoder import Decoder
from perilune.models.memory import blocks_bytes
from perilune.models.recurrence import DeltaInputs, PackedRecurrence, convolve

CONFIG = PRESETS["tiny"].replace(architecture="qwen3_5_text", delta=DeltaRule((0, 2), 2, 4, 8, 12))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    decoder = Decoder(CONFIG)
    decoder.initialize(0)
    return decoder


def prompts(*lengths: int, shared: int = 0) -> list[Prompt]:
    """Random prompts whose first `shared` tokens are equal."""
    begin = np.random.default_rng(99).integers(0, 98, shared).tolist()
    drawn = [np.random.default_rng(length).integers(0, 98, length).tolist() for length in lengths]
    return [Prompt([*begin, *tokens], (0, 0, index)) for index, tokens in enumerate(drawn)]


def samples(engine: Engine, of: list[Prompt], n: int = 3) -> list[Any]:
    out = engine.sample(of, n, SamplingParams(max_tokens=30))
    return [(sample.token_ids.tolist(), sample.logprobs.tolist()) for group in out for sample in group]


def test_chunks_preemption_and_forks_do_not_change_samples(decoder: Decoder) -> None:
    of = prompts(5, 16, 48, 83)
    expected = samples(Engine(decoder, slots=16), of)
    small = Engine(decoder, slots=4, cache_tokens=176, token_budget=24)
    assert samples(small, of) == expected
    assert small.counters.preemptions


def test_recurrent_state_is_reused_at_a_block_boundary(decoder: Decoder) -> None:
    of = prompts(7, 20, shared=70)
    alone = [samples(Engine(decoder, slots=4), [prompt], 2) for prompt in of]
    engine = Engine(decoder, slots=4)
    assert [samples(engine, [prompt], 2) for prompt in of] == alone
    assert engine.counters.cached_tokens == 64
    scored = engine.score([of[0].token_ids], [alone[0][0][0]])
    np.testing.assert_array_equal(scored[0], np.array(alone[0][0][1], dtype=np.float32))


def test_evicted_recurrent_state_is_loaded_from_offload_store(decoder: Decoder) -> None:
    of = prompts(40, 41, 42)
    expected = [samples(Engine(decoder, slots=2), [prompt], 1) for prompt in of]
    engine = Engine(decoder, slots=2, cache_tokens=128)
    engine.offload(OffloadSettings(1 << 24, always=True))
    for _ in range(2):
        assert [samples(engine, [prompt], 1) for prompt in of] == expected
    assert engine.offloaded.loaded_from_memory


def test_cache_size_equals_the_memory_plan(decoder: Decoder) -> None:
    engine = Engine(decoder, slots=4, cache_tokens=512, token_budget=64)
    assert engine._runner.cache.nbytes == blocks_bytes(CONFIG, 33, 4, token_budget=64)  # type: ignore[attr-defined]


def test_speculation_is_rejected_with_linear_attention(decoder: Decoder) -> None:
    engine = Engine(decoder, slots=2)
    assert not engine.speculates_exactly
    with pytest.raises(RequestError, match="linear attention"):
        engine.speculate(SpeculationSettings())


def rule(inputs: DeltaInputs) -> torch.Tensor:
    """The gated delta rule from its definition, for one sequence with two heads that share a key."""
    state = torch.zeros(2, *inputs.q.shape[2:], inputs.v.shape[2], dtype=inputs.v.dtype)
    outs = []
    for q, k, v, decay, strength in zip(*inputs, strict=True):
        state = decay[:, None, None] * state
        error = v - torch.einsum("hkv,k->hv", state, k[0])
        state = state + strength[:, None, None] * torch.einsum("k,hv->hkv", k[0], error)
        outs.append(torch.einsum("hkv,k->hv", state, q[0]))
    return torch.stack(outs)


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-4), (torch.float64, 1e-9)], ids=["C", "torch"]
)
def test_packed_scan_equals_the_gated_delta_rule(dtype: torch.dtype, most: float) -> None:
    """Two completions branch from a prompt at different tokens; a third sequence has no prompt."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 84, 1, 20, dtype=dtype)
    k = k / k.norm(dim=-1, keepdim=True)
    v, decays = torch.randn(84, 2, 83, dtype=dtype), torch.rand(2, 84, 2, dtype=dtype)
    inputs = DeltaInputs(q, k, v, *decays)
    for x in inputs:
        x.requires_grad_()
    spans = torch.tensor([[0, 66, 0, 0], [66, 9, 0, 66], [75, 4, 0, 20], [79, 5, 0, 0]])
    out = PackedRecurrence(spans, torch.device("cpu")).scan(0, inputs)
    tokens = torch.arange(84)
    sequences = [tokens[:66], tokens[:75], torch.cat([tokens[:20], tokens[75:79]]), tokens[79:]]
    expected = torch.cat(
        [
            rule(DeltaInputs(*(x[of] for x in inputs)))[-length:]
            for of, length in zip(sequences, spans[:, 1].tolist(), strict=True)
        ]
    )
    torch.testing.assert_close(out, expected, rtol=most, atol=most)
    factors = torch.randn_like(out)
    grads, wanted = (torch.autograd.grad((y * factors).sum(), inputs) for y in (out, expected))
    torch.testing.assert_close(grads, wanted, rtol=most, atol=10 * most)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["C", "torch"])
def test_convolve_equals_causal_conv1d(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(40, 300, dtype=dtype), torch.randn(300, 4, dtype=dtype)
    x.requires_grad_(), weight.requires_grad_()
    taps = torch.arange(40)[:, None] + torch.arange(-3, 1)
    before = torch.randn(3, 300, dtype=dtype)
    out = convolve(x, before, torch.where(taps < 0, 43 + taps, taps), weight)
    rows = torch.cat([before, x]).t()[None]
    expected = F.silu(F.conv1d(rows, weight[:, None], groups=300))[0].t()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    factors = torch.randn_like(out)
    grads, wanted = (torch.autograd.grad((y * factors).sum(), (x, weight)) for y in (out, expected))
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_shared_prompt_completions_are_bitwise_equal_to_separate_sequences(decoder: Decoder) -> None:
    prompt, answers = torch.randint(98, (37,)), [torch.randint(98, (n,)) for n in (21, 3)]
    tokens = torch.cat([prompt, *answers])
    positions = torch.cat([torch.arange(37), 37 + torch.arange(21), 30 + torch.arange(3)])
    packed = PackedAttention(
        torch.tensor([0, 37, 58, 61]), torch.tensor([-1, 0, 0]), torch.tensor([0, 37, 30])
    )
    shared = decoder(tokens, positions, packed)
    for answer, length, rows in zip(answers, (37, 30), (slice(37, 58), slice(58, 61)), strict=True):
        alone = torch.cat([prompt[:length], answer])
        bounds = torch.tensor([0, len(alone)])
        whole = decoder(alone, torch.arange(len(alone)), PackedAttention(bounds))
        assert torch.equal(whole[length:], shared[rows])
