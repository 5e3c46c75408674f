"""LoRA adapters in the engine: results equal merged weights, per request; loading and error messages."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from perilune.engine.engine import Engine
from perilune.engine.request import Request, SamplingParams
from perilune.engine.runner import TorchRunner
from perilune.errors import RequestError
from perilune.files import write_json
from perilune.models.adapters.files import Adapter
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder

CONFIG = PRESETS["tiny"].replace(initializer_range=0.15, num_layers=2)
TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")


def make() -> Decoder:
    decoder = Decoder(CONFIG)
    decoder.initialize(0)
    return decoder


def random_adapter(seed: int, rank: int = 4, scale: float = 0.5) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    modules = dict(make().named_modules())
    pairs = {}
    for layer in range(2):
        for target in TARGETS:
            name = f"model.layers.{layer}.{target}"
            out, inner = modules[name].weight.shape
            pairs[name] = (
                torch.randn(rank, inner, generator=generator) * 0.2,
                torch.randn(out, rank, generator=generator) * 0.2,
            )
    return Adapter(pairs, scale)


def merged(adapter: Adapter) -> Decoder:
    decoder = make()
    with torch.no_grad():
        for name, (a, b) in adapter.pairs.items():
            decoder.get_submodule(name).weight.add_(b @ a, alpha=adapter.scale)
    return decoder


def play(engine: Engine, requests: list[Request]) -> list[tuple[list[int], list[float]]]:
    ids = [engine.add(request, stream=False) for request in requests]
    samples: dict[int, tuple[list[int], list[float]]] = {}
    while engine.unfinished:
        for delta in engine.step():
            samples[delta.request_id] = (delta.token_ids, delta.logprobs)
    return [samples[request_id] for request_id in ids]


def request(key: int, adapter: str | None) -> Request:
    prompt = np.random.default_rng(key).integers(98, size=20 + key).tolist()
    return Request(prompt, SamplingParams(12), (key, 0, 0), adapter=adapter)


@pytest.fixture(params=["default runner", "torch"])
def engine(request: pytest.FixtureRequest) -> Engine:
    options: dict[str, Any] = {} if request.param == "default runner" else {"runner": TorchRunner}
    engine = Engine(make(), slots=8, cache_tokens=2048, **options)
    for name, seed in (("poet", 1), ("clerk", 2)):
        engine.add_adapter(name, random_adapter(seed))
    return engine


def test_engine_applies_each_adapter_only_to_its_own_requests(engine: Engine) -> None:
    requests = [
        request(0, "poet"),
        request(1, None),
        request(2, "clerk"),
        request(3, "poet"),
        request(4, None),
    ]
    together = play(engine, requests)
    assert together == [play(engine, [asked])[0] for asked in requests]  # bitwise equal in any batch
    decoders = {"poet": merged(random_adapter(1)), "clerk": merged(random_adapter(2)), None: make()}
    for asked, (tokens, logprobs) in zip(requests, together, strict=True):
        (expected,) = Engine(decoders[asked.adapter], cache_tokens=2048).score([asked.token_ids], [tokens])
        np.testing.assert_allclose(logprobs, expected, atol=2e-5)
        (scored,) = engine.score([asked.token_ids], [tokens], adapter=asked.adapter)
        assert scored.tolist() == logprobs
    assert together[0][1] != engine.score([requests[0].token_ids], [together[0][0]])[0].tolist()


def test_prefix_cache_is_separate_for_each_adapter(engine: Engine) -> None:
    long = np.random.default_rng(0).integers(98, size=64).tolist()
    for adapter, cached in ((None, 0), ("poet", 0), ("clerk", 0), ("poet", 48), (None, 48)):
        before = engine.counters.cached_tokens
        play(engine, [Request(long, SamplingParams(2), adapter=adapter)])
        assert engine.counters.cached_tokens - before == cached


def test_adapters_survive_weight_updates_and_can_be_replaced(engine: Engine) -> None:
    asked = [request(0, "poet")]
    first = play(engine, asked)
    engine.update_weights(make().state_dict(), 1)
    assert play(engine, asked) == first
    engine.add_adapter("poet", random_adapter(2))
    assert play(engine, asked) == play(engine, [request(0, "clerk")]) != first


def save(folder: Path, adapter: Adapter, **config: Any) -> Path:
    tensors = {
        f"base_model.model.{name}.lora_{part}.weight": tensor
        for name, pair in adapter.pairs.items()
        for part, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    write_json(folder / "adapter_config.json", {"peft_type": "LORA", "r": 4, "lora_alpha": 2, **config})
    return folder


def test_adapter_loads_files_of_peft(tmp_path: Path) -> None:
    adapter = random_adapter(1)
    read = Adapter.load(save(tmp_path, adapter))
    assert read.scale == 0.5
    assert read.pairs.keys() == adapter.pairs.keys()
    for name, pair in adapter.pairs.items():
        assert all(torch.equal(a, b) for a, b in zip(read.pairs[name], pair, strict=True))
    assert Adapter.load(save(tmp_path, adapter, use_rslora=True)).scale == 1.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "only plain LoRA"),
        ({"use_dora": True}, "only plain LoRA"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is not implemented"),
        ({"r": 0}, "r is 0 and lora_alpha is"),
    ],
)
def test_adapter_rejects_unsupported_peft_options(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=message):
        Adapter.load(save(tmp_path, random_adapter(1), **config))


def test_damaged_and_mismatched_adapters_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no adapter_model\.safetensors"):
        Adapter.load(tmp_path)
    save(tmp_path, random_adapter(1))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(RequestError, match="not safetensors"):
        Adapter.load(tmp_path)
    engine = Engine(make(), cache_tokens=256)
    a, b = torch.zeros(4, 96), torch.zeros(128, 4)
    for name, pair, message in [
        ("model.layers.7.self_attn.q_proj", (a, b), "no linear map of this name"),
        ("model.embed_tokens", (a, b), "no linear map of this name"),
        ("model.layers.0.self_attn.q_proj", (a[:, 1:], b), "do not fit"),
        ("model.layers.0.self_attn.q_proj", (a, b[:, 1:]), "do not fit"),
    ]:
        with pytest.raises(RequestError, match=message):
            engine.add_adapter("bad", Adapter({name: pair}, 1.0))
    with pytest.raises(RequestError, match="no adapter 'bad'"):
        engine.add(request(0, "bad"))
