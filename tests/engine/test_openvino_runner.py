"""OpenVINO as a runner of the engine, with the engine's block tables."""

import copy
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from perilune.engine.engine import Engine
from perilune.engine.openvino_package import import_openvino, list_devices
from perilune.engine.openvino_runner import OpenVino
from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.errors import RequestError
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.layer_kinds import Experts
from perilune.models.config.rope import Rope
from perilune.models.decoder import Decoder
from perilune.models.narrow import round_weight
from perilune.serve.server import _openvino_settings
from perilune.serve.settings import Settings
from perilune.tasks.evaluate.stage import EvaluateSpec
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.stage.sampling import OpenVinoSpec, ServerSpec

if find_spec("openvino") is None:
    pytest.skip("no OpenVINO: pip install openvino", allow_module_level=True)

SIZES = {"vocab_size": 98, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2}
SMALL = {**SIZES, "head_dim": 16, "initializer_range": 0.1}
CONFIGS = {
    "llama": DecoderConfig("llama", num_layers=2, tie_word_embeddings=False, **SMALL),
    "qwen2": DecoderConfig("qwen2", num_layers=1, **SMALL),
    "qwen3": DecoderConfig("qwen3", num_layers=2, **SMALL),
    "olmo2": DecoderConfig("olmo2", num_layers=1, **SMALL),
    "gemma3": DecoderConfig(
        "gemma3_text",
        num_layers=3,
        windows=(40, 40, None),
        local_rope=Rope(100.0),
        query_pre_attn_scalar=24,
        **SMALL,
    ),
}
PROMPTS = [Prompt([(7 * i + j * j) % 98 for j in range(n)], (0, 0, i)) for i, n in enumerate((1, 31, 64, 90))]


def new(name: str, seed: int = 1) -> Decoder:
    decoder = Decoder(CONFIGS[name])
    decoder.initialize(seed)
    return decoder


def engine(decoder: Decoder, settings: OpenVino | None = None) -> Engine:
    options = {"runner": settings} if settings else {}
    return Engine(decoder, slots=8, cache_tokens=2048, **options)


def sampled(engine: Engine, temperature: float = 1.0, tokens: int = 40) -> list[Completion]:
    groups = engine.sample(PROMPTS, 2, SamplingParams(tokens, temperature))
    return [completion for group in groups for completion in group]


def gap(completions: list[Completion], judge: Engine) -> float:
    """The largest difference between reported log-probs and those of `judge`, in nats."""
    prompts = [prompt.token_ids for prompt in PROMPTS for _ in range(2)]
    scores = judge.score(prompts, [list(completion.token_ids) for completion in completions])
    pairs = zip(scores, completions, strict=True)
    return float(max(np.abs(score - np.array(completion.logprobs)).max() for score, completion in pairs))


def capabilities() -> list[str]:
    """What OpenVINO says the CPU computes in, such as BF16."""
    return list(import_openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))


@pytest.mark.parametrize("name", CONFIGS)
def test_openvino_tokens_and_logprobs_agree_with_native_engine(name: str) -> None:
    decoder = new(name)
    other, ours = engine(decoder, OpenVino()), engine(decoder)
    for temperature in (0.0, 1.0):
        found, expected = sampled(other, temperature), sampled(ours, temperature)
        assert [c.token_ids.tolist() for c in found] == [c.token_ids.tolist() for c in expected]
    assert 0 < gap(found, ours) < 1e-4
    assert gap(found, other) < 1e-4  # scoring computes whole sequences at once
    assert other.counters.cached_tokens == 32 + 64  # hits of the second round, in blocks of 32


@pytest.mark.thorough
def test_openvino_weight_updates_take_effect_without_memory_growth() -> None:
    decoder = new("llama")
    other = engine(decoder, OpenVino())
    process, sizes = psutil.Process(), []
    for version in range(1, 51):
        decoder.initialize(version)
        other.update_weights(None, version)
        if version % 5 == 0:
            found = sampled(other, tokens=4)
            sizes.append(process.memory_info().rss)
    assert gap(found, engine(decoder)) < 1e-4
    assert sizes[-1] - sizes[2] < 8 << 20
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.zero_()  # training after an update does not change its version
    assert [completion.token_ids.tolist() for completion in sampled(other, tokens=4)] == [
        completion.token_ids.tolist() for completion in found
    ]


def test_openvino_int8_weights_and_u8_cache_are_close_to_native() -> None:
    decoder = new("llama")
    rounded = copy.deepcopy(decoder)
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                narrow = round_weight(parameter, "int8")
                assert narrow.scales is not None
                parameter.copy_(narrow.values.float() * narrow.scales[:, None])
    exact, judge = engine(decoder), engine(rounded)
    int8 = sampled(engine(decoder, OpenVino(weights="int8")))
    assert gap(int8, judge) < 1e-4 < gap(int8, exact)
    u8 = sampled(engine(decoder, OpenVino(cache="u8")))
    assert 1e-4 < gap(u8, exact) < 0.1


def test_openvino_computes_in_bfloat16_with_either_cache() -> None:
    if "BF16" not in capabilities():
        pytest.skip("this CPU does not compute in bfloat16")
    decoder = new("llama")
    for cache in ("float32", "u8"):
        settings = OpenVino(cache=cache, precision="bfloat16")
        assert 1e-4 < gap(sampled(engine(decoder, settings), tokens=4), engine(decoder)) < 0.2


def test_openvino_refuses_a_precision_that_the_device_replaces() -> None:
    if "FP16" in (found := capabilities()) or "BF16" not in found:
        pytest.skip("this CPU computes in float16, or not in bfloat16")
    with pytest.raises(RequestError, match="CPU computes in bfloat16 instead of float16") as raised:
        engine(new("llama"), OpenVino(precision="float16"))
    assert raised.value.remedy == "set the precision to bfloat16"


def test_openvino_rejects_unsupported_model_device_and_missing_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experts = Decoder(DecoderConfig("qwen3_moe", num_layers=1, experts=Experts(4, 2, 32), **SMALL))
    with pytest.raises(RequestError, match="cannot compute this model: it is a mixture of experts"):
        engine(experts, OpenVino())
    with pytest.raises(RequestError, match="device NPU; this machine has CPU"):
        engine(new("llama"), OpenVino(device="NPU"))
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(RequestError, match="openvino is not installed") as raised:
        engine(new("llama"), OpenVino())
    assert raised.value.remedy == 'pip install "perilune[openvino]"'


def test_importing_openvino_does_not_start_its_telemetry() -> None:
    assert "CPU" in list_devices()
    assert sys.modules["openvino_telemetry"] is None


def test_serve_settings_select_the_openvino_backend() -> None:
    chosen = Settings(Path(), backend="openvino", device="gpu.1", weights="int8", kv_cache="u8")
    assert _openvino_settings(chosen) == OpenVino("GPU.1", "int8", "u8")
    assert _openvino_settings(Settings(Path(), device="cpu")) is None
    with pytest.raises(RequestError, match="int8 needs --backend openvino"):
        Settings(Path(), weights="int8")
    with pytest.raises(RequestError, match="'NPU' is not auto, cpu or cuda"):
        Settings(Path(), device="NPU")


def test_recipe_engine_section_selects_openvino_or_a_server() -> None:
    checkpoint = {"checkpoint": "model"}
    evaluated = EvaluateSpec.model_validate({**checkpoint, "engine": "openvino"})
    assert evaluated.engine == OpenVinoSpec()
    server = EvaluateSpec.model_validate({**checkpoint, "engine": {"url": "http://localhost:1"}})
    assert isinstance(server.engine, ServerSpec)
    trained = RLSpec.model_validate({**checkpoint, "engine": {"name": "openvino", "weights": "int8"}})
    assert trained.engine is not None and trained.engine.runner() == OpenVino(weights="int8")
