"""Latent attention: the absorbed form and its cache against the expanded form."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch

from perilune.engine.cache import PagedCache
from perilune.engine.decode_step import GatheredAttention
from perilune.engine.engine import Engine
from perilune.engine.graph_runner import GraphRunner
from perilune.engine.native_runner import NativeRunner
from perilune.engine.request import Prompt, SamplingParams
from perilune.engine.runner import TorchRunner
from perilune.errors import RequestError
from perilune.models.attention import PackedAttention
from perilune.models.config.decoder_config import PRESETS
from perilune.models.config.layer_kinds import Latent
from perilune.models.config.rope import Rope, YarnScaling
from perilune.models.decoder import Decoder
from perilune.models.memory import blocks_bytes

CONFIG = PRESETS["tiny"].replace(
    architecture="deepseek_v3",
    num_kv_heads=4,
    head_dim=24,
    latent=Latent(40, 8, 16, 12, 20),
    rope=Rope(1e4, YarnScaling(8.0, 32, mscale=1.0, mscale_all_dim=0.7)),
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    decoder = Decoder(CONFIG)
    decoder.initialize(0)
    return decoder


def logits_and_gradients(decoder: Decoder) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of two sequences after a shared prompt, and gradients of all parameters."""
    tokens = torch.arange(60) * 7 % 98
    positions = torch.cat([torch.arange(30), 30 + torch.arange(20), 30 + torch.arange(10)])
    attention = PackedAttention(torch.tensor([0, 30, 50, 60]), torch.tensor([-1, 0, 0]))
    logits = decoder.logits(decoder(tokens, positions, attention))
    return logits, list(torch.autograd.grad(logits.logsumexp(-1).sum(), list(decoder.parameters())))


def test_absorbed_form_equals_expanded_form(decoder: Decoder) -> None:
    """The learner expands keys and values in float64, but not in float32 on a CPU."""
    logits, gradients = logits_and_gradients(decoder)
    wide = copy.deepcopy(decoder).double()
    expanded, expected = logits_and_gradients(wide)
    torch.testing.assert_close(logits.double(), expanded, rtol=1e-4, atol=1e-5)
    for gradient, other in zip(gradients, expected, strict=True):
        assert (gradient - other).norm() <= 1e-4 * other.norm() + 1e-5


def test_latent_cache_stores_one_vector_per_token(decoder: Decoder) -> None:
    cache = PagedCache(CONFIG, (11,), torch.float32)
    assert cache.nbytes == 11 * 16 * CONFIG.num_layers * (40 + 8) * 4 == blocks_bytes(CONFIG, 11, 1)


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.05), (torch.int8, 0.2)])
def test_narrow_cache_rounds_logprobs_within_bound(decoder: Decoder, dtype: torch.dtype, most: float) -> None:
    prompt = Prompt((np.arange(50) * 5 % 98).tolist(), (0, 0, 0))
    [[exact]] = Engine(decoder, slots=2).sample([prompt], 1, SamplingParams(max_tokens=20))
    engine = Engine(decoder, slots=2, runner=lambda *of: TorchRunner(*of, cache_dtype=dtype))
    [narrow] = engine.score([prompt.token_ids], [exact.token_ids])
    assert 0 < np.abs(narrow - exact.logprobs).max() < most


@pytest.mark.parametrize(
    "runner", [NativeRunner, lambda *of: GraphRunner(*of, attention=GatheredAttention)], ids=["C", "graphs"]
)
def test_other_runners_reject_latent_attention(decoder: Decoder, runner: Callable[..., object]) -> None:
    with pytest.raises(RequestError, match="TorchRunner"):
        Engine(decoder, slots=2, runner=runner)  # type: ignore[arg-type]
