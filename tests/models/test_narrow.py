"""Weights in bfloat16 and int8: rounding error of matrices and whole models, memory, updates in place."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from perilune.models import products
from perilune.models.attention import PackedAttention
from perilune.models.config.decoder_config import PRESETS, DecoderConfig
from perilune.models.config.layer_kinds import Experts
from perilune.models.decoder import Decoder
from perilune.models.layers import RMSNorm
from perilune.models.narrow import NarrowKind, NarrowWeight, round_weight
from perilune.models.native import ops

KINDS: list[NarrowKind] = ["bfloat16", "int8"]


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e20]),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 40)),
)
def test_int8_rounding_error_is_at_most_half_a_step(seed: int, scale: float, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * scale
    weight[0] *= 100  # a large channel must not affect the precision of the others
    narrow = round_weight(weight, "int8")
    assert narrow.values.dtype == torch.int8
    assert narrow.scales is not None
    error = (narrow.values.double() * narrow.scales[:, None].double() - weight.double()).abs()
    assert (error <= weight.double().abs().amax(1, keepdim=True) / 254 * (1 + 1e-5)).all()


def test_int8_channel_of_zeros_stays_zero() -> None:
    narrow = round_weight(torch.zeros(3, 8), "int8")
    assert torch.equal(narrow.matmul(torch.randn(2, 8)), torch.zeros(2, 3))


@pytest.mark.skipif(not ops.is_available(), reason="needs a C compiler: install gcc or clang")
@pytest.mark.parametrize("kind", KINDS)
def test_torch_and_c_kernels_round_equally(kind: NarrowKind) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 96), torch.randn(40, 96), torch.randn(40)
    packed = products.pack_weight(weight, bias, kind)
    expected = round_weight(weight, kind).matmul(x) + bias
    torch.testing.assert_close(products.linear(x, *packed), expected, rtol=1e-5, atol=2e-5)
    assert (expected - (x @ weight.T + bias)).abs().max() > 1e-4


@pytest.mark.skipif(not ops.is_available(), reason="needs a C compiler: install gcc or clang")
@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -0x7FFFFF])
def test_torch_and_c_kernels_keep_nan_in_bfloat16(bits: int) -> None:
    nan = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert nan.isnan() and nan.to(torch.bfloat16).isnan()
    x, weight = torch.ones(3, 32), torch.randn(40, 32)
    x[1, 5] = nan
    product = products.linear(x, *products.pack_weight(weight, None, "bfloat16"))
    assert torch.equal(product.isnan(), torch.tensor([[False], [True], [False]]).expand(3, 40))


def logits(decoder: Decoder) -> torch.Tensor:
    tokens = torch.arange(30) * 7 % 98
    with torch.no_grad():
        return decoder.logits(decoder(tokens, torch.arange(30), PackedAttention(torch.tensor([0, 30]))))


FEW = {"vocab_size": 98, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4}
HEADS = {"num_kv_heads": 2, "head_dim": 32, "initializer_range": 0.1}
MIXTURE = DecoderConfig(architecture="qwen3_moe", **FEW, **HEADS, experts=Experts(4, 2, 48))  # type: ignore[arg-type]
BIASED = DecoderConfig(architecture="qwen2", **FEW, **HEADS)  # type: ignore[arg-type]


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize(("kind", "bound"), [("bfloat16", 0.02), ("int8", 0.04)])
@pytest.mark.parametrize("config", [PRESETS["tiny"], BIASED, MIXTURE])
def test_narrow_frozen_copy_is_close_and_ignores_training(
    config: DecoderConfig, kind: NarrowKind, bound: float
) -> None:
    decoder = Decoder(config)
    decoder.initialize(0)
    exact, narrow = logits(decoder), decoder.frozen_copy(kind)
    close = logits(narrow)
    assert 0 < (close - exact).norm() / exact.norm() < bound
    assert close.dtype == torch.float32
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.5)
    assert torch.equal(logits(narrow), close)


def test_router_weights_are_not_rounded() -> None:
    decoder = Decoder(MIXTURE)
    decoder.initialize(0)
    x, mlp = torch.randn(9, 64), decoder.frozen_copy("int8").model.layers[0].mlp
    for ours, theirs in zip(mlp.route(x), decoder.model.layers[0].mlp.route(x), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize(("kind", "share"), [("bfloat16", 0.51), ("int8", 0.28)])
def test_narrow_matrices_use_less_memory(kind: NarrowKind, share: float, arithmetic: Any) -> None:
    weight = torch.randn(96, 128)
    packed, _ = products.pack_weight(weight, None, kind)
    tensors = packed.tensors if arithmetic == "native" else (packed.values, packed.scales)  # type: ignore[union-attr]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
    assert size <= share * weight.numel() * 4


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, None), (torch.float64, "int8")])
def test_refreeze_updates_weights_in_place(dtype: torch.dtype, kind: NarrowKind | None) -> None:
    """Captured graphs read weights in place. In these dtypes weights are plain tensors, as on a GPU."""
    decoder = Decoder(PRESETS["tiny"].replace(tie_word_embeddings=False)).to(dtype)
    decoder.initialize(0)
    frozen = decoder.frozen_copy(kind)
    decoder.initialize(1)
    anew = decoder.frozen_copy(kind)

    def tensors(model: Decoder) -> list[torch.Tensor]:
        held = [part for layer in model.projections() if layer.frozen is not None for part in layer.frozen]
        narrow = [part for w in held if isinstance(w, NarrowWeight) for part in (w.values, w.scales)]
        norms = [
            module.weight for module in model.modules() if isinstance(module, (RMSNorm, torch.nn.Embedding))
        ]
        qk = [block.self_attn.frozen_qk_norm for block in model.model.layers]
        return [tensor for tensor in (*held, *narrow, *norms, *qk) if isinstance(tensor, torch.Tensor)]

    places = [tensor.data_ptr() for tensor in tensors(frozen)]
    assert any(not torch.equal(*pair) for pair in zip(tensors(frozen), tensors(anew), strict=True))
    frozen.refreeze(decoder, kind)
    assert [tensor.data_ptr() for tensor in tensors(frozen)] == places
    assert all(torch.equal(*pair) for pair in zip(tensors(frozen), tensors(anew), strict=True))
    tokens, bounds = torch.arange(20), torch.tensor([0, 20])
    with torch.no_grad():
        states = [model(tokens, tokens, PackedAttention(bounds)) for model in (frozen, anew)]
    assert torch.equal(*states)


@pytest.mark.skipif(not hasattr(torch.ops.aten.mm, "dtype"), reason="needs PyTorch 2.8")
def test_gpu_products_of_bfloat16_return_float32() -> None:
    """Results are not rounded to bfloat16. Checks shapes and dtypes with fake tensors, without a GPU."""
    with FakeTensorMode():
        x, weight = torch.empty(5, 8, device="cuda"), torch.empty(3, 8, device="cuda")
        with mock.patch.object(torch, "mm", side_effect=torch.mm) as product:
            out = round_weight(weight, "bfloat16").matmul(x)
        assert product.call_args.args[0].dtype == torch.bfloat16
        assert (out.dtype, out.shape, out.device.type) == (torch.float32, (5, 3), "cuda")


@pytest.mark.skipif(not hasattr(torch.ops.aten.mm, "dtype"), reason="needs PyTorch 2.8")
@torch.no_grad()
def test_gpu_training_saves_rounded_input_and_returns_float32() -> None:
    """Checks shapes and dtypes with fake tensors, without a GPU."""
    ctx: Any = SimpleNamespace(needs_input_grad=(True, True, False))
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
    with FakeTensorMode(), mock.patch.object(torch, "mm", side_effect=torch.mm) as product:
        x, weight = torch.empty(5, 8, device="cuda"), torch.empty(3, 8, device="cuda")
        out = products._Linear.forward(ctx, x, weight, "bfloat16")
        of_x, of_weight, _ = products._Linear.backward(ctx, torch.empty_like(out))
    assert ctx.saved_tensors[0].dtype == torch.bfloat16 and ctx.saved_tensors[1] is weight
    assert {factor.dtype for call in product.call_args_list for factor in call.args} == {torch.bfloat16}
    for found, shape in ((out, (5, 3)), (of_x, x.shape), (of_weight, weight.shape)):
        assert (found.dtype, found.shape, found.device.type) == (torch.float32, shape, "cuda")


@pytest.mark.parametrize("supported", [True, False])
def test_gradients_in_bfloat16_are_near_with_and_without_instructions(
    supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_has_bfloat16_matmul", lambda: supported)
    x, weight = torch.randn(40, 96), torch.randn(96, 33).t()
    found = products.gradient_matmul(x, weight, "bfloat16")
    exact = x.bfloat16().double() @ weight.bfloat16().double().t()
    assert found.dtype == torch.float32
    tolerance = 2**-8 if supported else 1e-5  # oneDNN rounds the result to bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
