"""The transformers runner for architectures outside our decoder: samples and scores equal transformers."""

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perilune.engine.engine import Engine
from perilune.engine.request import Prompt, SamplingParams
from perilune.engine.runner import TorchRunner
from perilune.engine.transformers_runner import TransformersRunner
from perilune.errors import RequestError
from perilune.models.checkpoints.loading import save_checkpoint
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer
from perilune.models.transformers_model import (
    TransformersModel,
    load_for_inference,
    load_transformers_model,
)

SIZES = {"vocab_size": 98, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoX", {**SIZES, "intermediate_size": 64}),
    "phi": ("Phi", {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2}),
    "gpt2": ("GPT2", {"vocab_size": 98, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 200}),
    "cohere2": (
        "Cohere2",
        {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
    ),
    "opt": ("OPT", {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 200}),
}
ENDS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}


def save(path: Path, kind: str, changes: dict[str, Any]) -> Path:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**ENDS, "initializer_range": 0.3, **changes})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    Tokenizer.characters().save(path)
    return path


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TransformersModel:
    path = save(tmp_path_factory.mktemp(request.param), *MODELS[request.param])
    loaded, tokenizer = load_for_inference(path)
    assert isinstance(loaded, TransformersModel)
    assert tokenizer.vocab_size == 98
    assert f"model_type is '{request.param}', which Perilune's decoder does not compute" in loaded.notice
    assert "several times slower" in loaded.notice
    return loaded


PROMPTS = [Prompt(torch.arange(5, 5 + length).tolist(), (0, 0, length)) for length in (3, 20, 37)]


def logprobs(model: TransformersModel, prompt: list[int], answer: Any) -> np.ndarray:
    tokens = torch.tensor([[*prompt, *answer]])
    logits = model.module(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None].long())[:, 0].detach().numpy()


@torch.no_grad()
def test_sampled_and_scored_logprobs_equal_the_models(model: TransformersModel) -> None:
    engine = Engine(model, slots=5, cache_tokens=400, token_budget=24)
    groups = engine.sample(PROMPTS, 3, SamplingParams(max_tokens=14))
    for prompt, group in zip(PROMPTS, groups, strict=True):
        scores = engine.score([prompt.token_ids] * 3, [sample.token_ids.tolist() for sample in group])
        for sample, score in zip(group, scores, strict=True):
            expected = logprobs(model, list(prompt.token_ids), sample.token_ids.tolist())
            np.testing.assert_allclose(sample.logprobs, expected, atol=2e-5)
            np.testing.assert_allclose(score, expected, atol=2e-5)


@torch.no_grad()
def test_greedy_tokens_equal_those_of_generate(model: TransformersModel) -> None:
    engine = Engine(model, slots=4, cache_tokens=400, runner=TransformersRunner)
    prompt = PROMPTS[1].token_ids
    [[sample]] = engine.sample(PROMPTS[1:2], 1, SamplingParams(max_tokens=8, temperature=0))
    expected = model.module.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    assert sample.token_ids.tolist() == expected[0, len(prompt) :].tolist()


@torch.no_grad()
def test_small_cache_with_preemption_does_not_change_samples(tmp_path: Path) -> None:
    """Preempted samples lose their blocks to others."""
    model = load_transformers_model(save(tmp_path, *MODELS["gpt_neox"]))
    params = SamplingParams(max_tokens=24)
    engines = [
        Engine(model, slots=6, cache_tokens=tokens, runner=TransformersRunner) for tokens in (160, 4000)
    ]
    small, large = (chain.from_iterable(engine.sample(PROMPTS, 2, params)) for engine in engines)
    for a, b in zip(small, large, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
    assert engines[0].counters.preemptions > 0


@torch.no_grad()
def test_transformers_runner_agrees_with_the_decoder(tmp_path: Path) -> None:
    decoder = Decoder(PRESETS["tiny"])
    decoder.initialize(0)
    save_checkpoint(tmp_path, decoder, Tokenizer.characters())
    params = SamplingParams(max_tokens=8)
    reference, native = (
        Engine(model, slots=8, runner=runner).sample(PROMPTS, 2, params)
        for model, runner in (
            (load_transformers_model(tmp_path), TransformersRunner),
            (decoder, TorchRunner),
        )
    )
    for a, b in zip(chain.from_iterable(reference), chain.from_iterable(native), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_load_for_inference_prefers_the_decoder(tmp_path: Path) -> None:
    decoder = Decoder(PRESETS["tiny"])
    decoder.initialize(0)
    save_checkpoint(tmp_path, decoder, Tokenizer.characters())
    assert isinstance(load_for_inference(tmp_path)[0], Decoder)


def test_unsupported_option_falls_back_to_transformers(tmp_path: Path) -> None:
    sizes = {**SIZES, "intermediate_size": 64, "head_dim": 8, "num_key_value_heads": 2}
    path = save(tmp_path, "Qwen3", {**sizes, "hidden_act": "gelu"})
    model, _ = load_for_inference(path)
    assert isinstance(model, TransformersModel)
    assert "hidden_act is 'gelu'" in model.notice
    Engine(model, slots=2).sample(PROMPTS, 1, SamplingParams(max_tokens=2))


def test_model_without_attention_is_rejected(tmp_path: Path) -> None:
    path = save(tmp_path, "Mamba", {"vocab_size": 98, "hidden_size": 32, "num_hidden_layers": 2})
    with pytest.raises(RequestError, match="a mamba model has no attention heads"):
        load_transformers_model(path)


LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts_per_tok": 2,
}
GROUPED = {**SIZES, "num_hidden_layers": 4, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "Bamba",
            {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1},
            "'linear",
        ),
        (
            "Qwen3Next",
            {**LINEAR, **EXPERTS, "hidden_act": "gelu"},
            "a qwen3_next model has layers of kind 'linear_attention'",
        ),
        (
            "FalconH1",
            {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1},
            "a falcon_h1 model has layers of kind 'hybrid'",
        ),
    ],
)
def test_recurrent_layers_are_rejected_by_name(
    tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    path = save(tmp_path, kind, {**GROUPED, **changes})
    with pytest.raises(RequestError, match=message):
        load_for_inference(path)


def test_error_for_multimodal_model_names_its_text_model(tmp_path: Path) -> None:
    from transformers import Qwen3_5Config

    Qwen3_5Config(text_config={**GROUPED, **LINEAR}).save_pretrained(tmp_path)
    Tokenizer.characters().save(tmp_path)
    with pytest.raises(RequestError, match="model_type is 'qwen3_5'") as caught:
        load_for_inference(tmp_path)
    assert caught.value.remedy == "use a checkpoint of its text model alone, with model_type qwen3_5_text"


@torch.no_grad()
def test_layers_with_different_head_sizes_are_supported(tmp_path: Path) -> None:
    model, _ = load_for_inference(save(tmp_path, "Gemma4Text", GROUPED))
    assert isinstance(model, TransformersModel)
    [[sample]] = Engine(model, slots=2).sample(PROMPTS[1:2], 1, SamplingParams(max_tokens=6))
    expected = logprobs(model, list(PROMPTS[1].token_ids), sample.token_ids.tolist())
    np.testing.assert_allclose(sample.logprobs, expected, atol=2e-5)


@torch.no_grad()
def test_longrope_is_limited_to_the_original_length(tmp_path: Path) -> None:
    """Beyond that length every rotary angle changes, which invalidates the cached keys."""
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
        "factor": 4.0,
    }
    lengths = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
    path = save(tmp_path, "Phi3", {**GROUPED, **lengths, "rope_parameters": rope})
    model, _ = load_for_inference(path)
    assert isinstance(model, TransformersModel) and model.config.max_position_embeddings == 32
    engine = Engine(model, slots=2, cache_tokens=400)
    [[sample]] = engine.sample(PROMPTS[1:2], 1, SamplingParams(max_tokens=12))
    prompt = list(PROMPTS[1].token_ids)
    [score] = engine.score([prompt], [sample.token_ids.tolist()])
    np.testing.assert_allclose(score, sample.logprobs, atol=2e-5)
    np.testing.assert_allclose(score, logprobs(model, prompt, sample.token_ids.tolist()), atol=2e-5)
    with pytest.raises(RequestError, match="32"):
        engine.sample(PROMPTS[2:], 1, SamplingParams(max_tokens=12))


@torch.no_grad()
def test_sequences_of_different_lengths_share_one_forward_pass(
    model: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One forward pass per step at any lengths, and the same samples as without padding."""
    params = SamplingParams(max_tokens=12)
    prompts = [Prompt(list(range(5, 5 + length)), (0, length, 0)) for length in (9, 12, 15)]
    samples = []
    for pads in (True, False):
        runner = TransformersRunner(model, (40,))
        assert runner._supports_padding, "every model of this test can be padded"
        calls: list[tuple[int, ...]] = []
        compute = model.logits
        monkeypatch.setattr(model, "logits", lambda *a, _c=calls, _f=compute: _c.append(a[0].shape) or _f(*a))
        engine = Engine(model, slots=4, cache_tokens=400, runner=TransformersRunner)
        engine._runner._supports_padding = pads  # type: ignore[attr-defined]
        calls.clear()
        samples.append(engine.sample(prompts, 1, params))
        assert len([1 for shape in calls if shape[1] == 1]) == (11 if pads else 33)
        monkeypatch.undo()
    for a, b in zip(chain.from_iterable(samples[0]), chain.from_iterable(samples[1]), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = json.loads((path / "config.json").read_text())
    change(raw)
    (path / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(model_type="nobody_knows"), "transformers cannot load this model"),
        (lambda raw: raw.update(num_hidden_layers=10**6), "num_hidden_layers is 1000000, but must be"),
        (lambda raw: raw.update(num_hidden_layers=10**3), "num_hidden_layers is 1000, but the files hold"),
        (lambda raw: raw.update(hidden_size=10**5), "the files hold"),
        (lambda raw: raw.update(num_hidden_layers=1, vocab_size=50), "mismatched"),
        (lambda raw: raw.update(quantization_config={"bits": 4}), "quantization_config"),
        (lambda raw: raw.pop("model_type"), "model_type"),
        (lambda raw: raw.update(hidden_size=1e30), "cannot load this model: .*'hidden_size' expected int"),
        (lambda raw: raw.update(vocab_size="98"), "cannot load this model: .*'vocab_size' expected int"),
        (lambda raw: raw.update(text_config={"text_config": {}}), "has no attention heads"),
    ],
)
def test_mismatched_or_invalid_config_is_rejected(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    path = save(tmp_path, *MODELS["gpt_neox"])
    edit(path, change)
    with pytest.raises(RequestError, match=message):
        load_for_inference(path)


def test_remote_code_of_a_checkpoint_is_not_executed(tmp_path: Path) -> None:
    path = save(tmp_path, *MODELS["gpt_neox"])
    (path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\nclass Trap: pass\n")
    entries = {"AutoConfig": "trap.Trap", "AutoModelForCausalLM": "trap.Trap"}
    edit(path, lambda raw: raw.update(model_type="trap", auto_map=entries))
    with pytest.raises(RequestError, match="transformers cannot load this model"):
        load_for_inference(path)
    assert not (tmp_path / "sprung").exists()


def test_pickle_checkpoint_is_rejected(tmp_path: Path) -> None:
    path = save(tmp_path, *MODELS["gpt_neox"])
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(RequestError, match="is a pickle"):
        load_for_inference(path)
