"""Memory plans for adapters, narrow bases and recomputed layers, compared with measured memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import context
from task_cases import make_job
from torch.utils.checkpoint import checkpoint

from perilune.bundle.plugin import load_plugin
from perilune.data.episode import Episode
from perilune.files import write_json
from perilune.learn.adaptation import adapt
from perilune.learn.algorithms import algorithm
from perilune.learn.batch import pack
from perilune.learn.trainer import Learner
from perilune.learn.training_settings import LearnerSettings
from perilune.models.adapters.lora import BaseKind, attach_adapter, convert_base
from perilune.models.checkpoints.loading import load_checkpoint, new_model, save_checkpoint
from perilune.models.config.decoder_config import PRESETS, DecoderConfig
from perilune.models.config.layer_kinds import DeltaRule, Experts, Latent
from perilune.models.decoder import Decoder
from perilune.models.memory import CHECKPOINTING_BYTES, PROCESS_BYTES, adapter_parameters, base_bytes
from perilune.models.text.tokenizer import Tokenizer
from perilune.tasks.stage.memory_plan import peak_resident_bytes, plan_stage_memory

WIDE = DecoderConfig(
    architecture="qwen3", vocab_size=98, hidden_size=384, intermediate_size=1024, num_layers=6, num_heads=6,
    num_kv_heads=2, head_dim=64, max_position_embeddings=256,
)  # fmt: skip
MIXTURE = DecoderConfig(
    architecture="qwen3_moe", vocab_size=98, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=32, experts=Experts(4, 2, 48, dense_layers=(0,)), tie_word_embeddings=False,
)  # fmt: skip
LATENT = WIDE.replace(architecture="deepseek_v3", num_kv_heads=6, head_dim=24, latent=Latent(40, 8, 16, 12))
LINEAR = WIDE.replace(architecture="qwen3_5_text", delta=DeltaRule((0, 1, 2, 4), 2, 4, 8, 12))
SHARED = MIXTURE.replace(
    architecture="glm4_moe", experts=Experts(4, 2, 48, dense_layers=(0,), shared_size=96)
)
ONE_MATRIX = WIDE.replace(architecture="phi3")
TOKENS = 1024


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("o_proj", "gate_proj", "down_proj")])
@pytest.mark.parametrize("config", [PRESETS["tiny"], MIXTURE, LATENT, LINEAR, SHARED, ONE_MATRIX])
def test_adapter_parameters_are_counted(config: DecoderConfig, targets: tuple[str, ...]) -> None:
    decoder = Decoder(config)
    attach_adapter(decoder, targets, 4, alpha=8.0, seed=0)
    counted = sum(p.numel() for p in decoder.parameters() if p.requires_grad)
    assert adapter_parameters(config, 4, targets) == counted


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("config", [PRESETS["tiny"], WIDE])
def test_narrow_base_takes_the_planned_memory(config: DecoderConfig, kind: BaseKind) -> None:
    decoder = Decoder(config)
    convert_base(decoder, kind)
    size = sum(tensor.nbytes for tensor in (*decoder.parameters(), *decoder.buffers()))
    assert 0.97 * size < base_bytes(config, kind) < 1.03 * size


def learn(folder: Path, options: dict[str, Any], sender: Any) -> None:
    """Train one step and send the growth of this process in bytes."""
    torch.set_num_threads(1)
    x = torch.ones(1, requires_grad=True)  # loads the modules for recomputation before the measurement
    checkpoint(torch.sin, x, use_reentrant=False, preserve_rng_state=False).backward()
    start = peak_resident_bytes()
    settings = LearnerSettings.model_validate(options)
    decoder, _ = load_checkpoint(folder, base=settings.lora.base if settings.lora else "float32")
    adapt(decoder, settings, seed=0)
    learner = Learner(decoder, settings)
    random = np.random.default_rng(0)
    episodes = [
        Episode(
            f"0/0/{i}", "0/0", "t", "test", 0, (), random.integers(98, size=8).astype(np.int32),
            random.integers(98, size=248).astype(np.int32), np.ones(248, np.bool_), np.zeros(248, np.float32),
            np.zeros(248, np.int32), "stop", reward=1.0,
        )
        for i in range(TOKENS // 256)
    ]  # fmt: skip
    batches = pack([algorithm("sft")(episodes, max_tokens=0)], TOKENS)
    learner.forward_backward(batches)
    learner.optim_step(1e-4)
    sender.send(peak_resident_bytes() - start)


def test_peak_memory_matches_the_plan_and_its_order(tmp_path: Path) -> None:
    """Measured in fresh processes: a fork of this process would reuse heap that earlier tests have freed."""
    settings: dict[str, dict[str, Any]] = {
        "whole": {},
        "adapter": {"lora": {"base": "int8"}},
        "recomputed": {"activation_checkpointing": True},
        "both": {"lora": {"base": "int8"}, "activation_checkpointing": True},
    }
    tokenizer = Tokenizer.characters()
    save_checkpoint(tmp_path, new_model(WIDE, tokenizer, seed=0), tokenizer)
    peaks, plans = {}, {}
    for name, options in settings.items():
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=learn, args=(tmp_path, options, sender))
        process.start()
        peaks[name] = receiver.recv()
        process.join()
        plan = (
            plan_stage_memory(
                WIDE, token_budget=TOKENS, learner=LearnerSettings.model_validate(options)
            ).total
            - PROCESS_BYTES
        )
        plans[name] = plan - (CHECKPOINTING_BYTES if "activation_checkpointing" in options else 0)
    sizes = {name: (peaks[name] >> 20, plans[name] >> 20) for name in peaks}
    # The kernel drops pages of libraries when memory is short, so a peak may come out 150 MB lower.
    assert all(0.25 * plans[name] < peak < 1.15 * plans[name] for name, peak in peaks.items()), sizes
    assert peaks["both"] < peaks["recomputed"] < peaks["whole"], sizes
    assert peaks["both"] < peaks["adapter"] < peaks["whole"], sizes


def test_plan_shows_memory_saved_by_adapter_and_recomputation(tmp_path: Path) -> None:
    large = {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True, "max_position_embeddings": 40960,
    }  # fmt: skip
    write_json(tmp_path / "config.json", large)

    def memory(**options: Any) -> str:
        job = make_job("rl", model={"path": str(tmp_path)}, max_tokens=256, kl=0.01, **options)
        return str(load_plugin("rl").plan(job)["memory"])

    assert "reference 2.2 GiB, moments 4.4 GiB" in memory()
    frugal = memory(lora={"base": "int8"}, activation_checkpointing=True)
    assert "weights 718 MiB, engine 2.8 GiB" in frugal
    assert "reference" not in frugal
