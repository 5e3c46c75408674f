"""The learner computes exactly the log-probs of the engine, with packing and shared prompts."""

import numpy as np
import pytest

from perilune.data.episode import Episode
from perilune.engine.engine import Engine
from perilune.engine.request import Prompt, SamplingParams
from perilune.learn.algorithms import algorithm
from perilune.learn.batch import pack
from perilune.learn.trainer import Learner
from perilune.models.checkpoints.loading import new_model
from perilune.models.config.decoder_config import PRESETS, DecoderConfig
from perilune.models.config.layer_kinds import DeltaRule, Experts, Latent
from perilune.models.text.tokenizer import Tokenizer

MIXTURE = PRESETS["tiny"].replace(architecture="qwen3_moe", experts=Experts(8, 3, 48, dense_layers=(1,)))
LATENT = PRESETS["tiny"].replace(
    architecture="deepseek_v3", num_kv_heads=4, head_dim=24, latent=Latent(40, 8, 16, 12, 20)
)
LINEAR = PRESETS["tiny"].replace(architecture="qwen3_5_text", delta=DeltaRule((0, 2), 2, 4, 8, 12))


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize(
    ("config", "temperature", "token_budget"),
    [
        (PRESETS["tiny"], 1.0, 100_000),
        (PRESETS["tiny"], 0.8, 60),
        (MIXTURE, 0.8, 200),
        (LATENT, 0.8, 200),
        (LINEAR, 0.8, 200),
    ],
    ids=["dense", "dense, small batches", "experts", "latent attention", "linear attention"],
)
def test_engine_and_learner_logprobs_agree_for_each_architecture(
    config: DecoderConfig, temperature: float, token_budget: int
) -> None:
    tokenizer = Tokenizer.characters()
    decoder = new_model(config, tokenizer, seed=3)
    texts = ["12+7=", "347+268=", "what is 1?"]
    prompts = [Prompt(tokenizer.encode(text), (0, 1, i)) for i, text in enumerate(texts)]
    engine, learner = Engine(decoder), Learner(decoder)
    for _ in range(2):  # with fresh weights, and after an update
        engine.update_weights(None, learner.version)
        params = SamplingParams(30, temperature, stop_token_ids=tuple(range(5)))
        sampled = engine.sample(prompts, 4, params)
        groups = [
            [
                Episode(
                    f"1/{i}/{j}", f"1/{i}", f"t{i}", "test", 0, (), np.array(prompt.token_ids, np.int32),
                    answer.token_ids, np.ones(len(answer.token_ids), np.bool_), answer.logprobs,
                    answer.policy_version, answer.finish_reason, reward=float(j % 2),
                )
                for j, answer in enumerate(answers)
            ]
            for i, (prompt, answers) in enumerate(zip(prompts, sampled, strict=True))
        ]  # fmt: skip
        weighted = [algorithm("grpo")(group, max_tokens=30) for group in groups]
        figures = learner.forward_backward(pack(weighted, token_budget, temperature=temperature))
        assert figures["tokens"] == sum(len(answer.token_ids) for group in groups for answer in group)
        assert figures["logprob_gap_max"] == 0
        assert figures["clip_fraction"] == 0
        assert figures["staleness"] == 0
        learner.optim_step(1e-2)
