"""Mixtures of experts: routing, and bitwise equality of the native step with the learner's decoder."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from perilune.engine.native_runner import NativeRunner
from perilune.engine.runner import Runner, TorchRunner
from perilune.engine.select_runner import fastest_runner
from perilune.engine.step import StepBatch
from perilune.models.attention import PackedAttention
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.layer_kinds import Experts
from perilune.models.decoder import Decoder
from perilune.models.kernels import route

native_only = pytest.mark.parametrize("arithmetic", ["native"], indirect=True)


SHAPES = [(1, 1), (4, 2), (17, 17), (40, 3), (128, 8)]


@pytest.mark.usefixtures("arithmetic", "threads")
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("experts", "per_token"), SHAPES)
def test_routes_are_exact_and_independent_of_other_rows(
    experts: int, per_token: int, normalized: bool
) -> None:
    logits = torch.randn(150, experts, generator=torch.Generator().manual_seed(0)) * 3
    weights, chosen = route(logits, per_token, normalized)
    expected, indices = logits.double().softmax(-1).topk(per_token, dim=-1)
    if normalized:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(chosen, indices)
    for some in (slice(0, 1), slice(20, 50), slice(85, 150)):
        for part, whole in zip(route(logits[some], per_token, normalized), (weights, chosen), strict=True):
            assert torch.equal(part, whole[some])


@pytest.mark.usefixtures("arithmetic")
def test_lower_index_wins_among_equally_probable_experts() -> None:
    logits = torch.zeros(3, 20)
    logits[1, [19, 7, 3]] = 2.0
    logits[2] = torch.nan
    weights, chosen = route(logits, 5, False)
    assert chosen.tolist() == [[0, 1, 2, 3, 4], [3, 7, 19, 0, 1], [0, 1, 2, 3, 4]]
    assert weights[0].tolist() == [pytest.approx(0.05)] * 5
    assert weights[2].isnan().all()


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("experts", "per_token"), SHAPES)
def test_routing_gradient_equals_float64_reference(experts: int, per_token: int, normalized: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, experts, generator=generator, requires_grad=True)
    factors = torch.randn(9, per_token, generator=generator)
    (route(logits, per_token, normalized)[0] * factors).sum().backward()
    exact = logits.detach().double().requires_grad_()
    weights = exact.softmax(-1).topk(per_token, dim=-1).values
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    (weights * factors).sum().backward()
    assert logits.grad is not None and exact.grad is not None
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


SIZES: dict[str, Any] = {
    "architecture": "qwen3_moe", "vocab_size": 98, "hidden_size": 64, "intermediate_size": 80,
    "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "initializer_range": 0.1,
}  # fmt: skip
MIXTURES = {
    "one": Experts(1, 1, 24),
    "all": Experts(20, 20, 40, normalized=False),
    "some dense": Experts(4, 2, 48, dense_layers=(1,)),
    "wide": Experts(5, 3, 100),  # wider than a dense layer
    "mostly idle": Experts(128, 8, 32),
}


def make_decoder(experts: Experts) -> Decoder:
    decoder = Decoder(DecoderConfig(**SIZES, experts=experts))
    decoder.initialize(0)
    return decoder


def blocks(decoder: Decoder, rows: int) -> list[int]:
    return [1 + rows] * len(decoder.config.distinct_windows)


def first_tokens(rows: int, start: int = 0) -> StepBatch:
    """The first token of each of `rows` sequences."""
    return StepBatch(
        token_ids=np.arange(start, start + rows) * 7 % 98,
        positions=np.zeros(rows, dtype=np.int64),
        cu_seqlens=np.arange(rows + 1),
        decodes=rows,
        block_tables=np.arange(1, 1 + rows, dtype=np.int32).reshape(1, rows, 1),
        logit_rows=np.arange(rows),
    )


@torch.no_grad()
def learner_logits(decoder: Decoder, rows: int) -> Tensor:
    """Logits of the same sequences, packed as in training."""
    tokens, bounds = torch.arange(rows) * 7 % 98, torch.arange(rows + 1)
    hidden = decoder(tokens, torch.zeros(rows, dtype=torch.int64), PackedAttention(bounds))
    return decoder.logits(hidden)


@native_only
@pytest.mark.usefixtures("arithmetic", "threads")
@pytest.mark.parametrize("mixture", MIXTURES)
def test_native_step_is_bitwise_equal_to_learner_decoder(mixture: str) -> None:
    decoder = make_decoder(MIXTURES[mixture])
    expected = learner_logits(decoder, 140)
    runner = fastest_runner(decoder, blocks(decoder, 140))
    assert isinstance(runner, NativeRunner)
    for start, rows in (
        (0, 140),
        (0, 1),
        (17, 1),
        (3, 9),
    ):  # threads split 140 rows by rows, few rows by columns
        assert torch.equal(runner.run(first_tokens(rows, start)), expected[start : start + rows])


@native_only
@pytest.mark.usefixtures("arithmetic", "threads")
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_native_step_with_narrow_weights_agrees_with_torch(kind: Any) -> None:
    decoder = make_decoder(MIXTURES["some dense"])
    runners: list[Runner] = [
        make(decoder, blocks(decoder, 9), weights=kind) for make in (NativeRunner, TorchRunner)
    ]
    native, layers = (runner.run(first_tokens(9)) for runner in runners)
    torch.testing.assert_close(native, layers, rtol=1e-6, atol=1e-6)
    exact = learner_logits(decoder, 9)
    assert 0 < (native - exact).norm() / exact.norm() < 0.04


@native_only
@pytest.mark.usefixtures("arithmetic")
def test_native_runner_loads_new_expert_weights() -> None:
    decoder = make_decoder(MIXTURES["some dense"])
    runner = NativeRunner(decoder, blocks(decoder, 9))
    decoder.initialize(1)
    runner.load_weights(decoder)
    assert torch.equal(runner.run(first_tokens(9)), learner_logits(decoder, 9))


@native_only
@pytest.mark.usefixtures("arithmetic")
def test_odd_expert_size_in_bfloat16_falls_back_to_torch_runner() -> None:
    """The bfloat16 kernels read pairs of elements."""
    decoder = make_decoder(Experts(4, 2, 49)).to(torch.bfloat16)
    assert isinstance(fastest_runner(decoder, blocks(decoder, 1)), TorchRunner)
