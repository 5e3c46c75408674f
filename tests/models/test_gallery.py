"""The model gallery: published figures, code of each concept, and support verdicts."""

import functools
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from perilune.errors import RequestError
from perilune.models.attention import PackedAttention
from perilune.models.card.from_config import model_card
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.decoder import Decoder
from perilune.models.gallery.concepts import CONCEPTS, Concept
from perilune.models.gallery.facts import Entry, describe, shipped, support
from perilune.ui.gallery import render_gallery_markdown

UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}
ACTIVE = {"Qwen3 30B-A3B": (30.5e9, 3.3e9), "DeepSeek V3": (671e9, 37e9), "Mixtral 8x7B": (46.7e9, 12.9e9)}


@functools.cache
def documents() -> dict[str, dict[str, Any]]:
    return {document["name"]: document for document in map(describe, shipped())}


@pytest.mark.parametrize("entry", [item for item in shipped() if item.published], ids=lambda item: item.name)
def test_parameters_agree_with_published_numbers(entry: Entry) -> None:
    """Within 1%, or equal after rounding to the published digits ("7B" for 7.3 billion)."""
    text = entry.published["total"]
    unit = UNITS[text[-1]]
    published, computed = float(text[:-1]) * unit, model_card(entry.config).parameters
    digits = len(text[:-1].partition(".")[2])
    rounded = round(computed / unit, digits) * unit
    assert abs(computed - published) <= 0.01 * published or rounded == pytest.approx(published)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_agree_with_published_numbers(name: str) -> None:
    total, active = ACTIVE[name]
    assert documents()[name]["parameters"] == pytest.approx(total, rel=0.002)
    assert documents()[name]["active_parameters"] == pytest.approx(active, rel=0.02)


def test_gallery_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "gallery.md"
    made = render_gallery_markdown(list(documents().values()))
    assert page.read_text() == made, "perilune model gallery --markdown docs/reference/gallery.md"


def test_entries_are_unique_and_name_their_source() -> None:
    entries = shipped()
    assert len({entry.name for entry in entries}) == len(entries) >= 40
    assert all(entry.source and entry.identity.count("/") == 1 for entry in entries)
    assert not any(
        row["notes"] and "is unknown and read like" in row["notes"][0] for row in documents().values()
    )


def test_cache_bytes_of_full_windowed_and_latent_layers() -> None:
    """Worked examples: Llama 3.1 8B, gpt-oss 20B (12 of 24 layers with window 128), DeepSeek V3 (latent)."""
    cache = {
        name: documents()[name]["cache_bytes"] for name in ("Llama 3.1 8B", "gpt-oss 20B", "DeepSeek V3")
    }
    assert cache["Llama 3.1 8B"]["32768"] == 32 * 2 * 8 * 128 * 2 * 32768
    assert cache["gpt-oss 20B"]["131072"] == 12 * 2 * 8 * 64 * 2 * (131072 + 128)
    assert cache["DeepSeek V3"]["1024"] == 61 * (512 + 64) * 2 * 1024
    assert documents()["Gemma 2 9B"]["cache_bytes"]["32768"] is None, "beyond its context of 8,192"


def test_window_beyond_the_context_is_not_listed_as_swa() -> None:
    assert "SWA" not in documents()["Phi-4 mini"]["concepts"]
    assert "SWA" in documents()["Mistral 7B v0.1"]["concepts"]


@pytest.mark.parametrize("concept", CONCEPTS, ids=lambda item: item.name)
def test_concept_has_code_only_when_the_decoder_runs_it(concept: Concept) -> None:
    users = [row for row in documents().values() if concept.name in row["concepts"]]
    assert users, "no shipped model shows this concept"
    assert bool(concept.code) == any(row["runs"]["runs"] == "natively" for row in users)


SMALL = {
    "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
WITH = {
    "GQA": {"model_type": "llama", **SMALL},
    "SWA": {"model_type": "mistral", "sliding_window": 2, **SMALL},
    "QK norm": {"model_type": "qwen3", **SMALL},
    "NoPE": {"model_type": "smollm3", "no_rope_layers": [1, 0], **SMALL},
    "MoE": {"model_type": "qwen3_moe", **EXPERTS, **SMALL},
}
WITH["MLA"] = {"model_type": "deepseek_v3", "q_lora_rank": None, "first_k_dense_replace": 2, **SMALL}
WITH["Gated DeltaNet"] = {
    "model_type": "qwen3_5_text", **SMALL, "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}  # fmt: skip
WITHOUT = {"model_type": "llama", **SMALL}
ALWAYS_CALLED = {"GQA", "SWA", "NoPE"}  # the same function computes models without them


def calls(code: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of calls of the function in one forward pass."""
    module, _, path = code.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    function, seen = getattr(owner, name), []

    def counted(*args: Any, **options: Any) -> Any:
        seen.append(name)
        return function(*args, **options)

    decoder = Decoder(DecoderConfig.from_hf(config))
    decoder.initialize(0)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, counted)
        tokens = torch.arange(6)
        decoder(tokens, tokens, PackedAttention(torch.tensor([0, 6])))
    return len(seen)


@pytest.mark.parametrize("concept", [item for item in CONCEPTS if item.code], ids=lambda item: item.name)
def test_named_function_computes_the_concept(concept: Concept, monkeypatch: pytest.MonkeyPatch) -> None:
    assert concept.name in describe(Entry("one", "one", "here", WITH[concept.name]))["concepts"]
    assert calls(concept.code, WITH[concept.name], monkeypatch) >= 2
    if concept.name not in ALWAYS_CALLED:
        assert not calls(concept.code, WITHOUT, monkeypatch)


FP8, AWQ = ({"quantization_config": {"quant_method": method}} for method in ("fp8", "awq"))


@pytest.mark.parametrize(
    ("config", "runs", "reason"),
    [
        (WITHOUT, "natively", ""),
        (WITHOUT | FP8, "natively", ""),
        (WITHOUT | AWQ, "natively", ""),
        (WITHOUT | FP8 | {"model_type": "cohere2"}, "with transformers", "model_type is 'cohere2'"),
        (WITHOUT | {"model_type": "cohere2"}, "with transformers", "model_type is 'cohere2'"),
        (WITHOUT | {"model_type": "vit"}, "not", "vit is not a causal language model"),
        (WITHOUT | {"model_type": "of_tomorrow"}, "not", "does not recognize"),
        (WITHOUT | {"num_key_value_heads": 3}, "not", "cannot share 3"),
    ],
)
def test_support_describes_how_a_config_would_load(config: dict[str, Any], runs: str, reason: str) -> None:
    found = support(config)
    assert found["runs"] == runs
    assert reason in found["reason"]
    assert found["quantized"] == ("quantization_config" in config and config != WITHOUT | FP8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "4096"}, "hidden_size is '4096'"),
        ({"vocab_size": 10**30}, "vocab_size is 1000"),
        ({"num_hidden_layers": 10**9}, "at most 10000"),
        ({"sliding_window": -1, "model_type": "mistral"}, "sliding_window is -1"),
        ({"model_type": ["llama"]}, "model_type is ['llama']"),
    ],
)
def test_malformed_gallery_configs_are_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        describe(Entry("one", "one", "here", WITHOUT | change))
    assert message in str(refused.value)


def test_gallery_configs_have_no_code_or_generation_settings() -> None:
    file = Path(__file__).parents[2] / "src" / "perilune" / "models" / "gallery" / "models.json"
    keys = {key for model in json.loads(file.read_text())["models"] for key in model["config"]}
    assert not keys & {"auto_map", "bos_token_id", "eos_token_id", "vision_config", "transformers_version"}
