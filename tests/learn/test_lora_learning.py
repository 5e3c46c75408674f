"""Training with LoRA, a low-precision base or bfloat16 products: log-prob gap to the sampler, resuming."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perilune.data.episode import Episode
from perilune.engine.engine import Engine
from perilune.engine.request import Prompt, SamplingParams
from perilune.errors import RequestError
from perilune.learn.adaptation import adapt
from perilune.learn.algorithms import algorithm
from perilune.learn.batch import pack
from perilune.learn.distributed import Ranks
from perilune.learn.trainer import Learner
from perilune.learn.training_settings import LearnerSettings
from perilune.models.adapters.lora import adapter_pairs, convert_base
from perilune.models.checkpoints.loading import new_model
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.layer_kinds import Experts
from perilune.models.decoder import Decoder
from perilune.models.native import ops
from perilune.models.text.tokenizer import Tokenizer
from perilune.tasks.stage.memory_plan import plan_stage_memory
from perilune.tasks.stage.rounding import rounding_of

TOKENIZER = Tokenizer.characters()


def make(seed: int = 3, **settings: Any) -> Decoder:
    parsed = LearnerSettings.model_validate(settings)
    decoder = new_model("tiny", TOKENIZER, seed=seed)
    if parsed.lora is not None:
        convert_base(decoder, parsed.lora.base)
    adapt(decoder, parsed, seed=0)
    return decoder


def step(learner: Learner, engine: Engine) -> dict[str, float]:
    """Sample two groups and train on them."""
    prompts = [
        Prompt(TOKENIZER.encode(text), (0, learner.version, i)) for i, text in enumerate(("12+7=", "a b"))
    ]
    engine.update_weights(None, learner.version)
    sampled = engine.sample(prompts, 4, SamplingParams(24, 0.8, stop_token_ids=tuple(range(5))))
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
    weighted = [algorithm("grpo")(group, max_tokens=24) for group in groups]
    return learner.forward_backward(pack(weighted, 60, temperature=0.8)) | learner.optim_step(1e-2)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("base", ["", "float32", "bfloat16", "int8"])
def test_engine_and_learner_logprobs_agree_with_lora_and_bfloat16(base: str, precision: str) -> None:
    """Bitwise equal; within the documented bound where torch computes bfloat16 products by itself."""
    lora = {"rank": 4, "base": base} if base else None
    decoder = make(lora=lora, precision=precision)
    learner = Learner(decoder)
    engine = Engine(decoder, slots=8, cache_tokens=1024)
    for _ in range(3):
        gap = step(learner, engine)["logprob_gap_max"]
        assert gap <= (
            0.0 if precision == "float32" or ops.is_available() else rounding_of(decoder).largest / 2
        )
    if base:
        assert all(".lora_" in name for name in learner.optimizer.parameters)
    assert rounding_of(make()).largest < rounding_of(make(precision="bfloat16")).largest


def test_lora_state_resumes_only_on_the_base_it_was_trained_on(tmp_path: Path) -> None:
    lora = {"rank": 4, "base": "int8"}
    decoder = make(lora=lora)
    learner, engine = Learner(decoder), Engine(decoder, slots=8, cache_tokens=1024)
    step(learner, engine)
    learner.save_state(tmp_path / "saved")
    expected = step(learner, engine)
    written = sum(file.stat().st_size for file in (tmp_path / "saved").iterdir())
    assert written < 1.1 * 12 * sum(p.numel() for p in learner.optimizer.parameters.values())

    again = make(lora=lora)
    resumed = Learner(again)
    resumed.load_state(tmp_path / "saved")
    assert step(resumed, Engine(again, slots=8, cache_tokens=1024)) == expected
    assert all(
        torch.equal(p, learner.optimizer.parameters[name]) for name, p in resumed.optimizer.parameters.items()
    )
    for other in (make(lora={"rank": 4}), make(seed=4, lora=lora)):
        with pytest.raises(RequestError, match="the checkpoint belongs to frozen weights with checksum"):
            Learner(other).load_state(tmp_path / "saved")


def test_default_lora_targets_are_the_linear_maps_of_the_model() -> None:
    config = DecoderConfig(
        "gpt_oss", vocab_size=98, hidden_size=32, intermediate_size=8, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=16, tie_word_embeddings=False, attention_bias=True,
        experts=Experts(count=2, per_token=1, intermediate_size=8, normalized=True),
    )  # fmt: skip
    decoder = Decoder(config)
    adapt(decoder, LearnerSettings.model_validate({"lora": {"rank": 2}}), seed=0)
    adapted = {name.rpartition(".")[2] for name in adapter_pairs(decoder)}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    for section, message in (
        ({"targets": ["q_proj", "up_proj"]}, "no linear map up_proj"),
        ({"rank": 33}, r"lora.rank: 33 exceeds.* 32 at most"),
        ({"base": "int8"}, "experts of gpt_oss cannot be stored in int8"),
    ):
        with pytest.raises(RequestError, match=message):
            plan_stage_memory(config, learner=LearnerSettings.model_validate({"lora": section}))


def test_sharding_a_lora_adapter_is_rejected() -> None:
    with pytest.raises(RequestError, match="LoRA trains only an adapter, which is too small to shard"):
        Learner(make(lora={"rank": 4}), ranks=Ranks(0, 2, sharded=True))


def test_second_moments_are_restored_only_to_matching_parameters(tmp_path: Path) -> None:
    Learner(make(lora={"rank": 4})).save_state(tmp_path / "adapter")
    Learner(make()).save_state(tmp_path / "whole")
    Learner(make(lora={"rank": 4})).restore_second_moments(tmp_path / "adapter")
    Learner(make()).restore_second_moments(tmp_path / "whole")
    for other, state in (
        (make(lora={"rank": 8}), "adapter"), (make(lora={"rank": 4}), "whole"), (make(), "adapter"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match="has other parameters"):
            Learner(other).restore_second_moments(tmp_path / state)
