"""Training with bfloat16 products on a GPU: gradient error against float32, log-prob gap to the engine."""

import numpy as np
import pytest
import torch
from torch import Tensor

from perilune.data.episode import Episode
from perilune.engine.engine import Engine
from perilune.engine.request import Prompt, SamplingParams
from perilune.learn.algorithms import algorithm
from perilune.learn.batch import pack
from perilune.learn.trainer import Learner
from perilune.models.adapters.lora import attach_adapter, convert_base
from perilune.models.config.decoder_config import PRESETS, DecoderConfig
from perilune.models.config.layer_kinds import DeltaRule, Experts, Latent
from perilune.models.decoder import Decoder
from perilune.models.narrow import Precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DENSE = PRESETS["tiny"].replace(num_heads=4, num_kv_heads=2, head_dim=32, initializer_range=0.08)
CONFIGS = {
    "dense": DENSE,
    "with biases": DENSE.replace(architecture="qwen2"),
    "windows": DENSE.replace(architecture="gemma3_text", windows=(20, None, None)),
    "experts": DENSE.replace(architecture="qwen3_moe", experts=Experts(4, 2, 64, normalized=True)),
    "latent attention": DENSE.replace(
        architecture="deepseek_v3", num_kv_heads=4, head_dim=24, latent=Latent(40, 8, 16, 12, 20)
    ),
    "linear attention": DENSE.replace(architecture="qwen3_5_text", delta=DeltaRule((0, 2), 2, 4, 8, 12)),
}


def make_decoder(config: DecoderConfig, precision: Precision, *, adapted: bool) -> Decoder:
    decoder = Decoder(config)
    decoder.initialize(1)
    decoder = decoder.to("cuda")
    if adapted:
        convert_base(decoder, "bfloat16")
        attach_adapter(decoder, ["q_proj", "v_proj", "down_proj"], 4, 8.0, seed=0)
        for name, parameter in decoder.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator("cuda").manual_seed(2))
    decoder.set_precision(precision)
    return decoder


def sample_groups(engine: Engine) -> list[list[Episode]]:
    """Four answers to each of three prompts, with alternating rewards 0 and 1."""
    random = np.random.default_rng(0)
    prompts = [
        Prompt(random.integers(98, size=size).tolist(), (0, 1, i)) for i, size in enumerate((5, 40, 90))
    ]
    answers = engine.sample(prompts, 4, SamplingParams(60))
    return [
        [
            Episode(
                f"1/{i}/{j}", f"1/{i}", f"t{i}", "test", 0, (), np.array(prompt.token_ids, np.int32),
                answer.token_ids, np.ones(len(answer.token_ids), np.bool_), answer.logprobs,
                answer.policy_version, answer.finish_reason, reward=float(j % 2),
            )
            for j, answer in enumerate(of_prompt)
        ]
        for i, (prompt, of_prompt) in enumerate(zip(prompts, answers, strict=True))
    ]  # fmt: skip


def gradient(decoder: Decoder, groups: list[list[Episode]]) -> tuple[Tensor, dict[str, float]]:
    """The concatenated gradient of one GRPO step, and the metrics of the step."""
    learner = Learner(decoder)
    weighted = [algorithm("grpo")(group, max_tokens=60) for group in groups]
    figures = learner.forward_backward(pack(weighted, 400))
    found = [p.grad.flatten() for p in decoder.parameters() if p.grad is not None]
    return torch.cat(found), figures


@pytest.mark.parametrize("adapted", [False, True], ids=["all weights", "adapter"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_bfloat16_gradient_is_close_to_float32(config: DecoderConfig, adapted: bool) -> None:
    if adapted and config.latent is not None:
        pytest.skip("latent attention names its linear maps differently")
    narrow = make_decoder(config, "bfloat16", adapted=adapted)
    groups = sample_groups(Engine(narrow, slots=16, cache_tokens=4096))
    found, figures = gradient(narrow, groups)
    expected, _ = gradient(make_decoder(config, "float32", adapted=adapted), groups)
    limit = (
        0.1 if config.delta is None else 0.25
    )  # a recurrent state accumulates the rounding of all earlier tokens
    assert (found - expected).norm() < limit * expected.norm()
    assert figures["logprob_gap_mean"] < 0.02 and figures["logprob_gap_kl"] < 0.001
