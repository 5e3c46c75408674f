"""LoRA on float32, bfloat16 and int8 bases: gradients against float64, and bitwise exact merging."""

from typing import Any

import pytest
import torch
from lora_cases import TARGETS, TINY, TOKENS, logits, make
from torch import Tensor

from perilune.models.adapters.lora import (
    BaseKind,
    MergedProjection,
    adapter_pairs,
    attach_adapter,
    base_kind,
    base_state,
    convert_base,
    layer_linear_maps,
    merge_adapter,
    without_adapter,
)
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.layer_kinds import Experts
from perilune.models.decoder import Decoder

SIZES: dict[str, Any] = {
    "vocab_size": 98, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 32, "initializer_range": 0.1,
}  # fmt: skip
MIXTURE = DecoderConfig(architecture="qwen3_moe", **SIZES, experts=Experts(4, 2, 48))
BIASED = DecoderConfig(architecture="qwen2", **SIZES, tie_word_embeddings=False)


def loss(found: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(found[:-1].double(), TOKENS[1:])


def by_definition(decoder: Decoder, scale: float) -> dict[str, Tensor]:
    """Gradients in float64 of a plain torch decoder with the weights W + s B A."""
    plain = Decoder(decoder.config).double()
    weights = {name: tensor.double() for name, tensor in base_state(decoder).items() if "scales" not in name}
    for name, part in layer_linear_maps(decoder):
        scales = part.scales[:, None].double() if base_kind(decoder) == "int8" else 1.0
        weights[f"{name}.weight"] = part.weight.double() * scales
    pairs = {
        name: tuple(half.detach().double().requires_grad_() for half in pair)
        for name, pair in adapter_pairs(decoder).items()
    }
    for name, (a, b) in pairs.items():
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + scale * torch.einsum("or,ri->oi", b, a)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = plain

        def forward(self) -> Tensor:
            return logits(self.decoder)

    names = {f"decoder.{name}": tensor for name, tensor in weights.items()}
    loss(torch.func.functional_call(Logits(), names, ())).backward()
    return {
        f"{name}.lora_{part}.weight": half.grad
        for name, pair in pairs.items()
        for part, half in zip("AB", pair, strict=True)
        if half.grad is not None
    }


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("base", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("config", [TINY, MIXTURE, BIASED], ids=["tied", "experts", "biases"])
def test_lora_gradients_equal_float64_definition(config: DecoderConfig, base: BaseKind) -> None:
    decoder = make(config, base)
    loss(logits(decoder)).backward()
    expected = by_definition(decoder, scale=2.0)
    trained = {name: p for name, p in decoder.named_parameters() if p.requires_grad}
    assert trained.keys() == expected.keys()
    for name, gradient in expected.items():
        found = trained[name].grad
        assert found is not None
        assert (found - gradient).norm() <= 2e-5 * gradient.norm(), name
    frozen = [p for p in decoder.parameters() if not p.requires_grad]
    assert frozen
    assert all(p.grad is None for p in frozen)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("base", ["float32", "int8"])
def test_new_adapter_equals_base_and_merging_is_bitwise_exact(base: BaseKind) -> None:
    decoder = Decoder(TINY)
    decoder.initialize(0)
    convert_base(decoder, base)
    with torch.no_grad():
        start = logits(decoder)
        attach_adapter(decoder, TARGETS, 4, alpha=8.0, seed=0)
        assert torch.equal(logits(decoder), start)  # B is 0
        adapted = make(TINY, base)
        found = logits(adapted)
        assert (found - start).abs().max() > 1e-3
        assert torch.equal(logits(merge_adapter(adapted)), found)
        assert torch.equal(logits(adapted.frozen_copy()), found)
        assert torch.equal(logits(without_adapter(adapted)), start)
    assert not any(isinstance(layer, MergedProjection) for layer in merge_adapter(adapted).projections())
    learning = logits(adapted)
    assert torch.equal(learning, found)
    assert learning.requires_grad


def test_base_weights_are_shared_and_stored_in_the_requested_dtype() -> None:
    decoder = make(MIXTURE, "int8")
    assert base_kind(decoder) == base_kind(without_adapter(decoder)) == "int8"
    full, base = decoder.state_dict(), without_adapter(decoder).state_dict()
    assert base.keys() == base_state(decoder).keys() < full.keys()
    assert all(base[name].data_ptr() == full[name].data_ptr() for name in base)
    dtypes = {name.rpartition(".")[0].rpartition(".")[2]: tensor.dtype for name, tensor in base.items()}
    assert dtypes["q_proj"] in (torch.int8, torch.float32)  # the matrix, or its scales
    assert base["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert (
        base["model.layers.0.mlp.gate.weight"].dtype == torch.float32
    )  # rounding a router would change the chosen experts
    assert base["model.layers.0.mlp.experts.0.up_proj.weight"].dtype == torch.int8
    assert all(p.dtype == torch.float32 for p in decoder.parameters() if p.requires_grad)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("adapted", [True, False])
def test_bfloat16_products_are_close_to_float32_and_to_the_frozen_copy(adapted: bool) -> None:
    decoder = make() if adapted else Decoder(TINY)
    if not adapted:
        decoder.initialize(0)
    exact = logits(decoder)
    loss(exact).backward()
    gradients = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    decoder.zero_grad()
    decoder.set_precision("bfloat16")
    near = logits(decoder)
    assert near.dtype == torch.float32
    assert 1e-4 < (near - exact).norm() / exact.norm() < 0.02
    loss(near).backward()
    for name, parameter in decoder.named_parameters():
        if name in gradients:
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            assert (parameter.grad - gradients[name]).norm() < 0.05 * gradients[name].norm(), name
    with torch.no_grad():
        assert (logits(decoder.frozen_copy()) - near).abs().max() < 0.05


@pytest.mark.parametrize("config", [TINY, MIXTURE], ids=["dense", "experts"])
@pytest.mark.parametrize("adapted", [True, False])
def test_activation_checkpointing_gives_bitwise_equal_gradients(config: DecoderConfig, adapted: bool) -> None:
    def gradients(recompute: bool) -> dict[str, Tensor]:
        decoder = make(config) if adapted else Decoder(config)
        if not adapted:
            decoder.initialize(0)
        decoder.recompute = recompute
        loss(logits(decoder)).backward()
        return {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}

    expected, found = gradients(False), gradients(True)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
