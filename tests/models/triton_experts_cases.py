"""The Triton kernel for mixtures of experts; `test_triton_attention.py` runs this file."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_samples import DEVICE, check_samples

from perilune.engine.graph_runner import GraphRunner
from perilune.engine.runner import TorchRunner
from perilune.models.config.decoder_config import PRESETS
from perilune.models.config.layer_kinds import Experts
from perilune.models.decoder import Decoder
from perilune.models.grouped_experts import StackedWeight, group_by_expert
from perilune.models.narrow import NarrowWeight, round_weight
from perilune.models.triton_attention import IS_INTERPRETED
from perilune.models.triton_experts import grouped_product


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def expected(x: Tensor, weight: StackedWeight, chosen: Tensor) -> Tensor:
    """The products from their definition, in float64; `x` has one row per pair."""
    if weight.values.dtype == torch.bfloat16:
        x = x.bfloat16()
    matrices = weight.values.double()
    if weight.scales is not None:
        matrices = matrices * weight.scales.double()[..., None]
    return torch.stack([matrices[of] @ row.double() for of, row in zip(chosen.flatten(), x, strict=True)])


IDLE, SMALL = (9, 20, 3, 40, 100), (1, 4, 2, 64, 32)
CROWDED = 70, 3, 2, 80, 48  # more than 16 rows per expert


@pytest.mark.parametrize(
    ("dtype", "kind", "shape"),
    [(torch.float32, None, SMALL), (torch.float32, None, IDLE), (torch.float32, None, CROWDED),
     (torch.bfloat16, None, CROWDED), (torch.float32, "bfloat16", IDLE), (torch.float32, "int8", IDLE),
     (torch.bfloat16, "int8", CROWDED)],
)  # fmt: skip
def test_grouped_product_equals_the_definition(
    dtype: torch.dtype, kind: Any, shape: tuple[int, int, int, int, int]
) -> None:
    tokens, experts, per_token, inputs, outputs = shape
    matrices = random(experts * outputs, inputs)
    weight = NarrowWeight(matrices.to(dtype)) if kind is None else round_weight(matrices, kind)
    scales = None if weight.scales is None else weight.scales.view(experts, outputs)
    stacked = StackedWeight(weight.values.view(experts, outputs, inputs), scales)
    chosen = random(tokens, experts, seed=1).argsort(dim=1)[:, :per_token]
    chosen[:, 0] = experts - 1  # one expert gets all tokens
    groups = group_by_expert(chosen, experts)
    of_tokens, of_pairs = random(tokens, inputs, seed=2).to(dtype), random(chosen.numel(), inputs).to(dtype)
    tolerance = 3e-5 if dtype == torch.float32 else 0.02
    for x, rows in ((of_tokens, of_tokens.repeat_interleave(per_token, dim=0)), (of_pairs, of_pairs)):
        found = grouped_product(x, stacked, groups)
        assert found.dtype == dtype
        size = inputs**0.5
        torch.testing.assert_close(
            found.double() / size, expected(rows, stacked, chosen) / size, atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_product_rows_do_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    x, weight = random(12, 48).to(dtype), StackedWeight(random(6, 40, 48, seed=1).to(dtype))
    chosen = random(12, 6, seed=2).argsort(dim=1)[:, :2]

    def product(rows: slice) -> Tensor:
        return grouped_product(x[rows], weight, group_by_expert(chosen[rows], 6)).view(-1, 2, 40)

    together = product(slice(0, 12))
    # The interpreter multiplies tiles with numpy; on some processors rounding depends on the row in the tile.
    tolerance = 1e-5 if IS_INTERPRETED else 0.0
    for row in range(12):
        alone = product(slice(row, row + 1))[0]
        torch.testing.assert_close(alone, together[row], rtol=tolerance, atol=tolerance)


def test_grouped_sorts_pairs_by_expert() -> None:
    groups = group_by_expert(torch.tensor([[2, 0], [2, 3], [0, 2]]).to(DEVICE), 5)
    assert groups.order.tolist() == [1, 4, 0, 2, 5, 3]
    assert groups.ends.tolist() == [2, 2, 5, 6, 6]


def test_engine_with_triton_experts_samples_like_torch() -> None:
    config = PRESETS["tiny"].replace(
        architecture="qwen3_moe", experts=Experts(6, 2, 24), num_layers=2, initializer_range=0.15
    )
    decoder = Decoder(config)
    decoder.initialize(0)
    check_samples(decoder, *(partial(runner, weights="int8") for runner in (TorchRunner, GraphRunner)))
