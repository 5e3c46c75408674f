"""Stored decoders: engines read weights straight from checkpoint files, with equal samples."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perilune.engine.engine import Engine
from perilune.engine.request import Prompt, SamplingParams
from perilune.engine.runner import TorchRunner
from perilune.engine.select_runner import fastest_runner
from perilune.errors import RequestError
from perilune.models.adapters.files import Adapter
from perilune.models.checkpoints.checksum import checksum
from perilune.models.checkpoints.loading import load_decoder, save_checkpoint
from perilune.models.checkpoints.stored import open_decoder
from perilune.models.config.decoder_config import PRESETS, Experts
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer

TINY = PRESETS["tiny"].replace(num_layers=2, initializer_range=0.15)
CONFIGS = {
    "tied": TINY,
    "untied": TINY.replace(tie_word_embeddings=False, architecture="qwen2"),  # qwen2 has biases
    "experts": TINY.replace(architecture="qwen3_moe", experts=Experts(4, 2, 64)),
}
PROMPTS = [
    Prompt(np.random.default_rng(length).integers(98, size=length).tolist(), (0, 0, length))
    for length in (5, 40)
]


def folder(path: Path, config: Any = TINY, seed: int = 0) -> Path:
    decoder = Decoder(config)
    decoder.initialize(seed)
    save_checkpoint(path, decoder, Tokenizer.characters())
    return path


def sampled(engine: Engine) -> list[Any]:
    groups = engine.sample(PROMPTS, 2, SamplingParams(12))
    return [(sample.token_ids.tolist(), sample.logprobs.tolist()) for group in groups for sample in group]


def held(decoder: Decoder) -> set[str]:
    """Names of the decoder's matrices that are in memory."""
    matrices = {name: parameter for name, parameter in decoder.named_parameters() if parameter.dim() > 1}
    return {name for name, parameter in matrices.items() if not parameter.is_meta}


@pytest.mark.parametrize("runner", [fastest_runner, TorchRunner])
@pytest.mark.parametrize("name", CONFIGS)
def test_stored_decoder_samples_equal_those_of_loaded_decoder(name: str, runner: Any, tmp_path: Path) -> None:
    path = folder(tmp_path, CONFIGS[name])
    stored, read = open_decoder(path), load_decoder(Decoder, path)
    engines = [Engine(decoder, slots=4, cache_tokens=512, runner=runner) for decoder in (stored, read)]
    assert sampled(engines[0]) == sampled(engines[1])
    assert not held(stored)
    assert stored.dtype == torch.float32


def test_engine_of_stored_decoder_reloads_files_and_takes_other_weights(tmp_path: Path) -> None:
    path, other = folder(tmp_path / "a"), load_decoder(Decoder, folder(tmp_path / "b", seed=1))
    stored = open_decoder(path)
    engine = Engine(stored, slots=4, cache_tokens=512)
    first = sampled(engine)
    engine.update_weights(None, 1)
    assert engine.checksum == checksum(load_decoder(Decoder, path).state_dict())
    assert not held(stored)
    assert sampled(engine) == first
    engine.update_weights(other.state_dict(), 2)
    assert engine.checksum == checksum(other.state_dict())
    assert sampled(engine) == sampled(Engine(other, slots=4, cache_tokens=512)) != first


def test_adapter_on_stored_decoder_equals_adapter_on_loaded_decoder(tmp_path: Path) -> None:
    path = folder(tmp_path)
    a, b = torch.randn(2, 96), torch.randn(128, 2)
    adapter = Adapter({"model.layers.0.self_attn.q_proj": (a, b)}, 0.5)
    scores = []
    for decoder in (open_decoder(path), load_decoder(Decoder, path)):
        engine = Engine(decoder, slots=4, cache_tokens=512)
        engine.add_adapter("poet", adapter)
        scores.append(engine.score([[1, 2, 3]], [[4, 5, 6]], adapter="poet")[0].tolist())
    assert scores[0] == scores[1] != Engine(decoder, slots=1).score([[1, 2, 3]], [[4, 5, 6]])[0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_read_from_packed_head_equals_untied_embedding(dtype: torch.dtype) -> None:
    tied, untied = Decoder(TINY), Decoder(TINY.replace(tie_word_embeddings=False))
    tied.initialize(0)
    untied.load_state_dict({**tied.state_dict(), "lm_head.weight": tied.model.embed_tokens.weight})
    first, second = (sampled(Engine(model.to(dtype), slots=4, cache_tokens=512)) for model in (tied, untied))
    assert first == second


def test_stored_decoder_samples_equal_those_of_loaded_decoder_in_bfloat16(tmp_path: Path) -> None:
    path = folder(tmp_path)
    engines = [
        Engine(make(path, dtype=torch.bfloat16), slots=4, cache_tokens=512)
        for make in (open_decoder, partial(load_decoder, Decoder))
    ]
    assert sampled(engines[0]) == sampled(engines[1])


def test_changed_files_of_stored_decoder_are_detected(tmp_path: Path) -> None:
    stored = open_decoder(folder(tmp_path))
    folder(tmp_path, TINY.replace(intermediate_size=128))
    with pytest.raises(RequestError, match="changed while it was being read"):
        Engine(stored, slots=1, cache_tokens=64)
